"""The base class of deduplication steps: dedup keys of documents, the choice of duplicates, what is left of documents.

A step runs in tasks over units of documents, which write keys, and then over partitions of the keys ("buckets"), which
decide about duplicates.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import NonNegativeInt

from data_pipeline.base.store import Store
from data_pipeline.dedup.keys import Found, Keys, decide, hash64, read_duplicates, write_duplicates
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.step import Row, Step

CONTENT = ("id", "text", "url", "target", "language")  # the fields of every document that `without` gets


class KeyStep(Step):
    """A step that compares documents by keys.

    Attributes:
        version: a number to raise when the bytes of the keys change, or what is left of documents.
        counted_as: the name under which dropped documents are counted. "": `duplicate_STEP`.
        group: the number of key words that duplicates share.
        order: the number of key words that rank duplicates; the smallest is kept.
        columns: the fields of documents that `gather` needs.
        drops: False if the step only finds the places where the next step looks.
        shortens: True if the step may drop a part of a text. By default, the rules for language, bad words and the
            classifier come after such steps.
        compares_dropped_pages: True if pages that rules dropped while inputs were read have keys too. Such a page has
            only `url` and `timestamp`; its other fields are empty. If no document of the corpus has a URL, the step is
            left out.
        clusters: True if duplicates are found as pairs of documents. Connected pairs are a cluster, of which one
            document is kept.
        bytes_of_keys: the memory that the keys of a unit take at most, in bytes for each byte of its text.
        bytes_of_duplicates: the same for the duplicates in a unit, if all its items are duplicates. The defaults are
            those of lines of 40 characters.
    """

    version: ClassVar[int] = 2
    counted_as: ClassVar[str] = ""
    group: ClassVar[int] = 1
    order: ClassVar[int] = 1
    columns: ClassVar[tuple[str, ...]] = ("id", "text", "url", "target")
    drops: ClassVar[bool] = True
    shortens: ClassVar[bool] = False
    compares_dropped_pages: ClassVar[bool] = False
    clusters: ClassVar[bool] = False
    bytes_of_keys: ClassVar[float] = 2.5
    bytes_of_duplicates: ClassVar[float] = 3

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(item, words) of each key of a document. An item is a line, a span or the document: it may be a duplicate."""
        raise NotImplementedError

    def gather(self, documents: Iterable[tuple[int, Document]], keys: Keys, repeated: np.ndarray | None = None) -> None:
        """Adds the keys of numbered documents to `keys`.

        `repeated`: the sorted positions that the previous step found, if that step has `drops = False`.
        """
        for number, document in documents:
            for item, words in self.keys(document):
                keys.add(number, item, words)

    def decide(self, table: np.ndarray, units: np.ndarray, path: Path, count: int) -> None:
        """Writes the duplicates among the keys of a bucket: `table` (n, words), from `units` (n,) below `count`."""
        _, duplicates, copies = decide(table, self.group, units)
        kept = units[copies] << np.uint64(32) | table[copies, -1] >> np.uint64(32) if self.names_kept else None
        write_duplicates(path, units[duplicates], table[duplicates, -1], count, kept)

    def without(self, document: Document, duplicates: list[int], tally: Tally) -> str | Dropped:
        """The text without the items `duplicates`, or why the document is dropped. `tally` counts dropped parts.

        By default, a document with duplicates is dropped. A document without text left is dropped anyway.
        """
        return Dropped(self.counted_as or f"duplicate_{self.step}", document.text) if duplicates else document.text

    @property
    def names_kept(self) -> bool:
        """Whether the step says which document stays in the place of a dropped one."""
        return self.drops and not self.shortens

    def found(self, store: Store, keys: str, duplicates: Sequence[str], unit: int) -> Found:
        """The duplicates in a unit: those within it, in its file of `keys`, and those in the files `duplicates`."""
        own = None if self.clusters else keys  # clusters include the pairs within a unit
        return read_duplicates(store, own, duplicates, unit, self.names_kept)

    def left(self, rows: Iterable[Row], found: Found, tally: Tally) -> Iterator[Row]:
        """`rows`, in order, with what the step leaves of each document. Counts what is dropped."""
        for number, document, left in rows:
            if left is not None:
                text = self.without(left, found.items.get(number, []), tally)
                if isinstance(text, str) and text is not left.text and not text.strip():
                    text = Dropped("empty_after_dedup", left.url or left.id)
                if isinstance(text, Dropped):
                    tally.drop(self.step, left, replace(text, kept=found.kept.get(number)))
                    left = None
                elif text is not left.text:
                    left = left.with_text(text)
            yield number, document, left


class ShorteningStep(KeyStep):
    """A step that drops parts of texts."""

    min_sentences: NonNegativeInt = 0
    """Minimum number of sentences of a text without its duplicates. Documents with fewer are dropped. 0: off."""

    shortens: ClassVar[bool] = True

    def enough(self, text: str, document: Document) -> str | Dropped:
        """`text`, the rest of `document`, if it is long enough; else why the document is dropped."""
        if not text:
            return Dropped("empty_after_dedup", document.url or document.id)
        if self.min_sentences and count_sentences(text, self.min_sentences) < self.min_sentences:
            return Dropped("too_few_sentences_after_dedup", text)
        return text


def rank(document: Document) -> int:
    """The rank of a document; the smallest keeps its copy. A hash of its URL or id, so that no site is favoured."""
    return hash64(document.url or document.id)
