"""Exact duplicates: of documents with the same text, the one with the smallest id stays."""

from collections.abc import Iterator

from data_pipeline.dedup.step import Step
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally


class EqualDocuments(Step):
    """Compares documents by a 128-bit hash of their text and target."""

    name = "documents"
    group, order = 2, 0

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        digest = document.digest
        yield 0, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        if duplicates:
            tally.drop("duplicate_document", document.text)
            return None
        return document.text
