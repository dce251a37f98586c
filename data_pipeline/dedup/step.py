"""What a step of deduplication is: the keys of a document, and what losing some of them does to it."""

from collections.abc import Iterator
from typing import Any, Protocol

from data_pipeline.dedup.keys import hash64
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.tally import Tally

Row = dict[str, Any]


class Step(Protocol):
    """`group`, `order`: words of a key that must be equal, and words by which the smallest holder keeps it."""

    group: int
    order: int

    def keys(self, row: Row) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(item, words) of each key of a document; items count what can be lost: lines, spans, the document itself."""

    def without(self, row: Row, lost: list[int], tally: Tally, min_sentences: int) -> str | None:
        """The text without the items `lost`, None if the document goes; counts what is dropped."""


def rank(row: Row) -> int:
    """By which documents win: a hash of the URL as it was, else of the id, so that no site is favoured."""
    return hash64(row["url"] or row["id"])


def enough_left(text: str, row: Row, tally: Tally, min_sentences: int) -> str | None:
    """`text` if it is still a page of `min_sentences`, counted over the whole text; else None, counted."""
    if not text:
        tally.drop("empty_after_dedup", row["url"] or row["id"])
    elif min_sentences and count_sentences(text, min_sentences) < min_sentences:
        tally.drop("too_few_sentences_after_dedup", text)
    else:
        return text
    return None
