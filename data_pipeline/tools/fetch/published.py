"""Published files and their publishers."""

import re
from dataclasses import dataclass

from data_pipeline.foundation.errors import FailedError

COMMON_CRAWL = "https://data.commoncrawl.org/"
HUGGING_FACE = "https://huggingface.co/"
WIKIMEDIA = "https://dumps.wikimedia.org/"
C4_CONFIGS = ("en", "en.noblocklist", "en.noclean", "realnewslike")
# No name may start with a dot: downloads keep their state in `.fetch` beside the files.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*")
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}|sha1:[0-9a-f]{40}|md5:[0-9a-f]{32}")


@dataclass(frozen=True)
class PublishedFile:
    """A file in a publisher's list: its address, its place on disk, and its expected size and checksum.

    `path` is its place below the output directory, `size` its bytes, and `checksum` is "sha256:…", "sha1:…" or "md5:…".
    Size and checksum are None if the publisher gives none. Lists come from the network, so their values are checked:
    `PublishedFile(url, "../../x")`, which would leave the output directory, raises FailedError.
    """

    url: str
    path: str
    size: int | None = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if not all(_PART.fullmatch(part) for part in self.path.split("/")):
            raise self._refused(self.path, "a relative path of letters, digits and _.+=-")
        if self.checksum is not None and not _CHECKSUM.fullmatch(self.checksum):
            raise self._refused(self.checksum, "a checksum sha256:…, sha1:… or md5:…")
        if self.size is not None and (not isinstance(self.size, int) or self.size < 0):
            raise self._refused(self.size, "a size in bytes")

    def _refused(self, found: object, expected: str) -> FailedError:
        return FailedError(f"{self.url}: refused: the list says {found!r}, expected {expected}")
