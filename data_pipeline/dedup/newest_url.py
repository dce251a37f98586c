"""Of the pages of a URL, the newest stays (C4's rule, TFDS `c4_utils`)."""

from collections.abc import Iterator

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import Step
from data_pipeline.text.document import Document, Tally, normalize_url

_TIMESTAMP_BYTES = 24


class NewestUrl(Step):
    """Of the pages with the same normalised URL, the newest stays; of equally new ones, that with the smallest URL md5.

    As in C4, pages that cleaning drops for their content are compared too. They have no id.
    """

    name = "urls"
    order = 4
    columns = ("id", "url", "timestamp", "target")
    compares_dropped_pages = True

    @staticmethod
    def words(url: str, timestamp: str, kept: bool) -> tuple[int, ...]:
        """The words of a key: URL hash, inverted bytes of the timestamp, md5 with `kept` pages before dropped ones."""
        padded = timestamp.encode("utf-8", "surrogatepass")[:_TIMESTAMP_BYTES].ljust(_TIMESTAMP_BYTES, b"\0")
        newest_first = (2**64 - 1 - int.from_bytes(padded[at : at + 8], "big") for at in range(0, _TIMESTAMP_BYTES, 8))
        return hash64(normalize_url(url)), *newest_first, hash64(url) & ~1 | (not kept)

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.url and not document.target:
            yield 0, self.words(document.url, document.timestamp, bool(document.id))

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        if duplicates:
            tally.drop("duplicate_url", document.url)
            return None
        return document.text
