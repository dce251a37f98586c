"""The base class of deduplication steps: dedup keys of documents, the choice of duplicates, what is left of documents.

A step runs in tasks over units of documents, which write keys, and then over partitions of the keys ("buckets"), which
decide about duplicates.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data_pipeline.base.config_file import Section
from data_pipeline.base.packages import named
from data_pipeline.base.store import Store
from data_pipeline.dedup.keys import Keys, decide, hash64, read_duplicates, write_duplicates
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.sentences import count_sentences

CONTENT = ("id", "text", "url", "target", "language")  # the fields of every document that `without` gets

Row = tuple[int, Document, Document | None]
"""(number in the unit, document as stored, what is left of the document or None)"""

Found = Mapping[int, list[int]]
"""The duplicate items of each document of a unit, by the document's number in the unit."""


class StepConfig(Section):
    """A step of an installed package, with its own keys."""

    step: str
    """The step's name."""


class Step:
    """A step of deduplication, made with its settings: the value of its key in the section `dedup`, or its element of
    `dedup.custom`.

    Attributes:
        name: the step's name, in the config and in files. A step of an installed package has the name of its entry
            point.
        config: the class of the step's element of `dedup.custom`.
        rule: the name under which dropped documents are counted. "": `duplicate_NAME`.
        setting: the key in the section `dedup`, if it isn't the name.
        version: a number to raise when the bytes of the keys change.
        group: the number of key words that duplicates share.
        order: the number of key words that rank duplicates; the smallest is kept.
        columns: the fields of documents that `gather` needs.
        drops: False if the step only finds the places where the next step looks.
        shortens: True if the step may drop a part of a text. The page filters run after such steps.
        compares_dropped_pages: True if pages that cleaning dropped have keys too.
        clusters: True if duplicates are found as pairs of documents. Connected pairs are a cluster, of which one
            document is kept.
    """

    name: ClassVar[str] = ""
    config: ClassVar[type[StepConfig]] = StepConfig
    rule: ClassVar[str] = ""
    setting: ClassVar[str] = ""
    version: ClassVar[int] = 2
    group: ClassVar[int] = 1
    order: ClassVar[int] = 1
    columns: ClassVar[tuple[str, ...]] = ("id", "text", "url", "target")
    drops: ClassVar[bool] = True
    shortens: ClassVar[bool] = False
    compares_dropped_pages: ClassVar[bool] = False
    clusters: ClassVar[bool] = False

    def __init__(self, settings: Any = None):
        pass

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
        _, duplicates, _ = decide(table, self.group, units)
        write_duplicates(path, units[duplicates], table[duplicates, -1], count)

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        """The text without the items `duplicates`; None if the document is dropped. Counts what is dropped.

        By default, a document with duplicates is dropped. A document without text left is dropped and counted anyway.
        """
        if not duplicates:
            return document.text
        tally.document(self.rule or f"duplicate_{self.name or type(self).__name__.lower()}", document.text)
        return None

    def found(self, corpus: Store, keys: str, duplicates: Sequence[str], unit: int) -> Found:
        """The duplicates in a unit: those within it, in its file of `keys`, and those in the files `duplicates`."""
        own = None if self.clusters else keys  # clusters include the pairs within a unit
        return read_duplicates(corpus, own, duplicates, unit)

    def left(self, rows: Iterable[Row], found: Found, tally: Tally, min_sentences: int) -> Iterator[Row]:
        """`rows`, in order, with what the step leaves of each document. Counts what is dropped."""
        for number, document, left in rows:
            if left is not None:
                text = self.without(left, found.get(number, []), tally, min_sentences)
                if text is None:
                    left = None
                elif text is not left.text and not text.strip():
                    tally.document("empty_after_dedup", left.url or left.id)
                    left = None
                elif text is not left.text:
                    left = replace(left, text=text)
            yield number, document, left


def custom_step(given: object) -> object:
    """The settings `given` of a step, in its class. Raises ValueError if no installed package has the step."""
    return named(given, "step", "dedup_steps", Step).config.model_validate(given) if isinstance(given, dict) else given


def rank(document: Document) -> int:
    """The rank of a document; the smallest keeps its copy. A hash of its URL or id, so that no site is favoured."""
    return hash64(document.url or document.id)


def enough_left(text: str, document: Document, tally: Tally, min_sentences: int) -> str | None:
    """`text` if it still has `min_sentences`; else None, and the dropped `document` is counted."""
    if not text:
        tally.document("empty_after_dedup", document.url or document.id)
    elif min_sentences and count_sentences(text, min_sentences) < min_sentences:
        tally.document("too_few_sentences_after_dedup", text)
    else:
        return text
    return None
