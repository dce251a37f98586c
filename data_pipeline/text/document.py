"""One document of text, from any source, and its URL as C4 compares it."""

import hashlib
import re
from dataclasses import dataclass

_SCHEME = re.compile(r"https?://(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored in `documents/*.parquet`.

    `id` is the source's name, the path relative to the source's root and the record's ordinal, so it is the same on
    every machine. `target` is set for text-to-text pairs, whose input is `text`. A field that the source doesn't give
    is "", and so is one that was not read.
    """

    id: str = ""
    text: str = ""
    url: str = ""
    title: str = ""
    language: str = ""
    source: str = ""
    split: str = ""
    timestamp: str = ""
    target: str = ""

    @property
    def digest(self) -> bytes:
        """A hash of text and target: 16 bytes, which equal documents share."""
        return hashlib.blake2b(f"{self.text}\0{self.target}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def normalize_url(url: str) -> str:
    """`url` without scheme, `www.`, tracking parameters and trailing slashes; letter case is kept (TFDS `c4_utils`).

    https://www.Example.com/a/?utm_source=x  ->  Example.com/a
    """
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")


def is_chosen(text: str, numerator: int, denominator: int) -> bool:
    """Whether `text` is in a share of all texts, as TFDS chooses them: md5 mod `denominator` is below `numerator`."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % denominator < numerator
