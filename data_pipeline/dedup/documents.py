"""Exact duplicates: of documents with the same text, the one with the smallest id stays."""

import hashlib
from collections.abc import Iterator

from data_pipeline.dedup.step import Row
from data_pipeline.text.tally import Tally


class EqualDocuments:
    """Compares documents by a 128-bit hash of their text and target."""

    group, order = 2, 0

    def keys(self, row: Row) -> Iterator[tuple[int, tuple[int, ...]]]:
        content = f"{row['text']}\0{row['target']}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        yield 0, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))

    def without(self, row: Row, lost: list[int], tally: Tally, min_sentences: int) -> str | None:
        if lost:
            tally.drop("duplicate_document", row["text"])
            return None
        return row["text"]
