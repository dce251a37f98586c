"""Sends an export to the Hugging Face Hub, for `pretrain export … --push-to-hub`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from data_pipeline.base import hub, stores
from data_pipeline.base.errors import FailedError, UserError, one_line
from data_pipeline.base.formatting import counted, first_few, human_size

_NAMES_SHOWN = 20
_SECONDS = 10.0  # timeout of a request


@dataclass(frozen=True)
class Destination:
    """A repository of models, named "OWNER/NAME". `exists`: True if the Hub has it already."""

    name: str
    private: bool
    exists: bool

    @classmethod
    def of(cls, name: str, public: bool) -> "Destination":
        """The repository `name`. If `name` has no owner, the owner is the user of the Hub's token.

        Raises UserError for a wrong name, without a valid token, and for a public repository unless `public` is true.
        """
        api, url = hub.api(), f"{hub.endpoint()}/{name}"
        try:
            user = stores.with_retries(api.whoami, url, stores.LISTING_SECONDS)
            name = name if "/" in name else f"{user['name']}/{name}"
            url = f"{hub.endpoint()}/{name}"
            found = stores.with_retries(lambda: _private(api, name), url, stores.LISTING_SECONDS)
        except HFValidationError as error:
            raise UserError(f"--push-to-hub: {name!r}: expected NAME or OWNER/NAME: {one_line(error)}") from None
        if found is False and not public:
            raise UserError(f"--push-to-hub: {url} is public: add --public, or give another name")
        return cls(name, not public if found is None else found, found is not None)

    @property
    def url(self) -> str:
        return f"{hub.endpoint()}/{self.name}"

    def describe(self, folder: Path) -> str:
        """A line that says what `send` will send, and where."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        size = human_size(sum(path.stat().st_size for path in files))
        names = first_few((str(path.relative_to(folder)) for path in files), _NAMES_SHOWN)
        which = f"{'private' if self.private else 'public'}{'' if self.exists else ', new'}"
        return f"sending {counted(len(files), 'file')}, {size}, to {self.url} ({which}): {names}"

    def send(self, folder: Path) -> str:
        """Sends the files of `folder`, which replace files of the same names; returns the URL of the commit.

        If the Hub refuses or doesn't answer, raises UserError or FailedError with the command that sends them later.
        """
        api = hub.api()

        def upload() -> str:
            if not self.exists:
                api.create_repo(self.name, private=self.private, exist_ok=True)
            try:
                sent = api.upload_folder(repo_id=self.name, folder_path=folder, commit_message="pretrain export")
            except RuntimeError as error:  # its cause is the error about one file
                raise error.__cause__ or error from None
            return str(sent.commit_url)

        try:
            return stores.with_retries(upload, self.url)
        except Exception as error:  # of huggingface_hub, of its upload, or of the HTTP library
            option = " --private" if self.private else ""
            way_out = f"{folder} is complete; to send it: hf upload {self.name} {folder} .{option}"
            kind = type(error) if isinstance(error, UserError) else FailedError
            raise kind(f"{error if isinstance(error, UserError) else one_line(error)}; {way_out}") from None


def _private(api: Any, name: str) -> bool | None:
    """True if a repository is private; None if it doesn't exist."""
    try:
        return bool(api.repo_info(name, timeout=_SECONDS).private)
    except RepositoryNotFoundError:
        return None
