"""Exact duplicates: of documents with the same text, the one with the smallest id stays."""

from collections.abc import Iterator

from data_pipeline.dedup.step import Step
from data_pipeline.text.document import Document


class EqualDocuments(Step):
    """Compares documents by a 128-bit hash of their text and target."""

    name, rule = "documents", "duplicate_document"
    group, order = 2, 0

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        digest = document.digest
        yield 0, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))
