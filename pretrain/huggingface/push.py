"""Uploads an export to the Hugging Face Hub, or to a server that speaks its protocol. Never shows the token."""

from pathlib import Path

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import MASK, masked, without_login
from pretrain.huggingface.directory import CONFIG, README

_REFUSALS = {
    401: "refuses the token (401): it is wrong, expired, or not of this server",
    403: "the token may not write to {} (403)",
    404: "has no model {}, or hides it from this token; --create makes it",
}
_IGNORED = [".*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]  # no export has these: hidden files, and pickles


def push(export: Path, repository: str, endpoint: str | None = None, create: bool = False) -> str:
    """Uploads the files of `export` as a commit to the model `repository`; returns its address.

    The token is HF_TOKEN or that of `hf auth login`. `endpoint`: the server; by default HF_ENDPOINT or the Hub.
    `create`: makes the repository first, private, if there is none. Raises UserError without an export, a token, a
    repository or the right to write to it, FailedError if the server can't be reached or fails.
    """
    for name in (CONFIG, README):
        if not (export / name).is_file():
            raise UserError(f"{export}: not an export: no {name}; write one with pretrain export CHECKPOINT OUT")
    from huggingface_hub import HfApi, get_token  # takes a second to import
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    token = get_token()
    if not token:
        raise UserError("no token for the Hub: set HF_TOKEN to one that may write, or log in with hf auth login")
    api = HfApi(endpoint=endpoint, token=token)
    server = without_login(api.endpoint)
    try:
        if create:
            api.create_repo(repository, private=True, exist_ok=True)
        else:
            api.repo_info(repository)  # fails at once where an upload would first retry
        commit = api.upload_folder(
            repo_id=repository, folder_path=export, commit_message="Upload of an export", ignore_patterns=_IGNORED
        )
    except HfHubHTTPError as error:
        status, reason = error.response.status_code, _without(token, error)
        if status in _REFUSALS:
            raise UserError(f"{server}: {_REFUSALS[status].format(repository)}") from None
        raise FailedError(f"{server}: {reason}") from None
    except (HTTPError, OSError, RuntimeError) as error:
        raise FailedError(f"{server}: can't be reached: {_without(token, error)}") from None
    except ValueError as error:  # a wrong name of a repository, or metadata that the server rejects
        raise UserError(f"{repository}: {_without(token, error)}") from None
    return without_login(str(commit.repo_url))


def _without(token: str, error: Exception) -> str:
    """The error in one line, without secrets."""
    lines = " ".join(str(error).split()) or type(error).__name__
    return masked(lines.replace(token, MASK))
