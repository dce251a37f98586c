"""Sends an export to the Hugging Face Hub, for `pretrain export … --push-to-hub`."""

from pathlib import Path

from data_pipeline.base import hub
from data_pipeline.base.errors import FailedError, one_line


def push(folder: Path, name: str, public: bool) -> str:
    """Sends the files of `folder` to the repository of models `name`, NAME or OWNER/NAME; returns the commit's URL.

    A new repository is private unless `public`. Raises FailedError if the Hub refuses or doesn't answer.
    """
    api = hub.api()
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        return str(api.upload_folder(repo_id=repository.repo_id, folder_path=folder).commit_url)
    except Exception as error:  # of huggingface_hub, of its upload, or of the HTTP library
        later = f"{folder} is complete; to send it: hf upload {name} {folder} .{'' if public else ' --private'}"
        raise FailedError(f"--push-to-hub: {one_line(error)}; {later}") from None
