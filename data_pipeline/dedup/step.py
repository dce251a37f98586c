"""The interface of a deduplication step: the keys of a document, and its text without the duplicates."""

from collections.abc import Iterator
from typing import Protocol

from data_pipeline.dedup.keys import hash64
from data_pipeline.text.document import Document
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.tally import Tally


class Step(Protocol):
    """A step of deduplication.

    `group` is the number of key words that duplicates share, `order` the number of words that rank them, smallest
    first.
    """

    group: int
    order: int

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(item, words) of each key of a document. An item is what may be a duplicate: a line, a span, the document."""

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        """The text without the items `duplicates`, or None if the document is dropped. Counts what is dropped."""


def rank(document: Document) -> int:
    """The rank of a document, smallest first: a hash of its URL, else of its id, so that no site is favoured."""
    return hash64(document.url or document.id)


def enough_left(text: str, document: Document, tally: Tally, min_sentences: int) -> str | None:
    """`text` if it still has `min_sentences`, counted over the whole text; else None. Counts a dropped document."""
    if not text:
        tally.drop("empty_after_dedup", document.url or document.id)
    elif min_sentences and count_sentences(text, min_sentences) < min_sentences:
        tally.drop("too_few_sentences_after_dedup", text)
    else:
        return text
    return None
