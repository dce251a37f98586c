"""URLs as C4 compares them (TFDS `c4_utils`), and the newest page of each."""

import re
from collections.abc import Iterator

from data_pipeline.dedup.keys import hash64
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_SCHEME = re.compile(r"https?://(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")
_TIMESTAMP_BYTES = 24


def normalize_url(url: str) -> str:
    """`url` without scheme, `www.`, tracking parameters and trailing slashes; letter case is kept.

    https://www.Example.com/a/?utm_source=x  ->  Example.com/a
    """
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")


class NewestUrl:
    """Of the pages with the same normalised URL, the newest stays; of equally new ones, that with the smallest URL md5.

    Keys are collected while pages are read, because in C4 pages that cleaning drops for their content also compete.
    """

    group, order = 1, 4

    @staticmethod
    def words(url: str, timestamp: str, kept: bool) -> tuple[int, ...]:
        """The words of a key: URL hash, inverted bytes of the timestamp, md5 with `kept` pages before dropped ones."""
        padded = timestamp.encode("utf-8", "surrogatepass")[:_TIMESTAMP_BYTES].ljust(_TIMESTAMP_BYTES, b"\0")
        newest_first = (2**64 - 1 - int.from_bytes(padded[at : at + 8], "big") for at in range(0, _TIMESTAMP_BYTES, 8))
        return hash64(normalize_url(url)), *newest_first, hash64(url) & ~1 | (not kept)

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The key that was collected while reading, from the row of a document that cleaning kept."""
        if document.url:
            yield 0, self.words(document.url, document.timestamp, True)

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        if duplicates:
            tally.drop("duplicate_url", document.url)
            return None
        return document.text
