"""Sends an export to the Hugging Face Hub, for `pretrain export … --push-to-hub`."""

from pathlib import Path

from data_pipeline.base import hub
from data_pipeline.base.errors import FailedError, UserError, one_line


def push(folder: Path, name: str, public: bool) -> str:
    """Sends the files of `folder` to the repository of models `name`, NAME or OWNER/NAME; returns the commit's URL.

    A new repository is private unless `public`. Raises UserError for a public repository without `public`, and
    FailedError, with the command that sends the files later, if the Hub refuses or doesn't answer.
    """
    api, later = (
        hub.api(),
        f"{folder} is complete; to send it: hf upload {name} {folder} .{'' if public else ' --private'}",
    )
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        if not public and not api.repo_info(repository.repo_id).private:
            raise UserError(f"--push-to-hub: {repository} is public: add --public, or give another name; {later}")
        sent = api.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="pretrain export")
    except UserError:
        raise
    except Exception as error:  # of huggingface_hub, of its upload, or of the HTTP library
        raise FailedError(f"--push-to-hub: {one_line(error)}; {later}") from None
    return str(sent.commit_url)
