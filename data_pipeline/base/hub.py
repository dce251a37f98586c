"""The Hugging Face Hub: parses `hf://` URLs, and explains what the Hub refuses."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from data_pipeline.base.errors import StoreError, UserError, one_line

LOG_IN = "set HF_TOKEN, or run: hf auth login"
_PREFIX, _BUCKETS = "hf://", "hf://buckets/"
_KIND = "(datasets|models|spaces)/"
_URL = re.compile(rf"hf://(?:{_KIND})?(?!{_KIND})([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
_COMMIT = re.compile("[0-9a-f]{40}")


def endpoint() -> str:
    """The address of the Hub, or of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def api() -> Any:
    """The client of the Hub, with the token that the environment or `hf auth login` gives."""
    from huggingface_hub import HfApi  # takes a while, and most commands don't need it

    return HfApi(endpoint())


@dataclass(frozen=True)
class HubPath:
    """A path in a repository at a revision: a branch, a tag or a commit. `kind`: "datasets", "models" or "spaces"."""

    kind: str
    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        return f"{self.root}/{self.path}"

    @property
    def root(self) -> str:
        """The URL of the repository at this revision. The file system expects no kind for models."""
        kind = "" if self.kind == "models" else f"{self.kind}/"
        return f"hf://{kind}{self.repository}@{quote(self.revision, safe='')}"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never moves."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> "HubPath":
        return replace(self, revision=revision)


def parse(url: str) -> HubPath | None:
    """The parts of a URL such as "hf://datasets/allenai/c4@main/en/*.json.gz"; None for any other path or URL.

    Raises UserError for an `hf://` URL without an owner and a name.
    """
    if not url.startswith(_PREFIX) or url.startswith(_BUCKETS):
        return None
    if (found := _URL.fullmatch(url)) is None:
        raise UserError(f"{url}: expected hf://datasets/OWNER/NAME/PATH, or …/NAME@REVISION/PATH")
    kind, _, repository, revision, path = found.groups()
    return HubPath(kind or "models", repository, unquote(revision or "main"), path or "")


def commits(paths: str | list[str]) -> dict[str, str]:
    """The commits in `paths`, by repository: "datasets/allenai/c4"."""
    found = map(parse, [paths] if isinstance(paths, str) else paths)
    return {f"{one.kind}/{one.repository}": one.revision for one in found if one is not None and one.is_commit}


def sha256_of(info: Mapping[str, Any]) -> str:
    """The sha256 that the Hub publishes of a file, from the listing of huggingface_hub; "" if it publishes none."""
    lfs = info.get("lfs")
    return str(lfs["sha256"]) if lfs else ""


def refusal(error: BaseException, url: str) -> StoreError | None:
    """The error to raise if the Hub refuses a request, with the way out. None: another error, or a later request may
    succeed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "LocalTokenNotFoundError" in names:
        return StoreError(f"{url}: no token; {LOG_IN}")
    if "OfflineModeIsEnabled" in names:
        return StoreError(f"{url}: HF_HUB_OFFLINE is set; unset it")
    if "HfHubHTTPError" not in names:
        return None
    status = getattr(getattr(error, "response", None), "status_code", 0)
    place = parse(url)
    where = f"{place.kind}/{place.repository}" if place else url
    page = f"{endpoint()}/{where.removeprefix('models/')}"
    reasons = {
        "GatedRepoError": f"{where} is gated: accept its conditions at {page}, then {LOG_IN}",
        "RevisionNotFoundError": f"{where} has no revision {place.revision if place else ''!r}",
        "RepositoryNotFoundError": f"the Hub has no {where}, or it is private; for a private one {LOG_IN}",
        "EntryNotFoundError": "no such file",
        401: f"the Hub refuses the token: {one_line(error)}; {LOG_IN}",
        403: f"permission denied: {one_line(error)}",
    }
    found = next((reason for kind, reason in reasons.items() if kind in {*names, status}), None)
    return StoreError(f"{url}: {found}") if found else None
