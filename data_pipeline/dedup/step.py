"""What a step of dedup is: the keys of a document, how duplicates are decided, and what is left of documents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data_pipeline.dedup.keys import Keys, decide, hash64, read_duplicates, write_duplicates
from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.packages import named
from data_pipeline.foundation.store import Store
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.sentences import count_sentences

CONTENT = ("id", "text", "url", "target", "language")  # fields that `without` has of every document

Row = tuple[int, Document, Document | None]
"""(number in the unit, document as its part has it, what is left of the document)"""

Found = Mapping[int, list[int]]
"""The duplicate items of each document of a unit, by the document's number."""


class StepConfig(Section):
    """A step of an installed package, with its own keys."""

    step: str
    """The step's name."""


class Step:
    """A step of dedup, made with its settings: the value of its key in the section `dedup`.

    One of an installed package gets its element of `dedup.custom`, of the class `config`.

    `version` grows when the bytes of its keys change. `group` is the number of key words that duplicates share, `order`
    the number of words that rank them, smallest first. `columns` are the fields of documents that `gather` needs;
    `without` has those, and `text`, `url`, `target` and `language`.

    `rule` is what dropped documents are counted as, by default duplicate_ and the name, or the class if it has none;
    `setting` is the key of the section, if it isn't the name.
    `drops`: False for a step that only finds the places where the next one looks.
    `shortens`: true if the step may drop a part of a text; language and bad words are looked at after such steps.
    `compares_dropped_pages`: true if pages that cleaning dropped have keys too.
    `clusters`: whether buckets find pairs of documents (`Pairs`), of whose clusters one document stays.
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
        """(item, words) of each key of a document. An item is what may be a duplicate: a line, a span, the document."""
        raise NotImplementedError

    def gather(self, documents: Iterable[tuple[int, Document]], keys: Keys, repeated: np.ndarray | None = None) -> None:
        """Adds the keys of numbered documents to `keys`.

        `repeated`: the sorted positions that the step before found, if that drops nothing.
        """
        for number, document in documents:
            for item, words in self.keys(document):
                keys.add(number, item, words)

    def decide(self, table: np.ndarray, units: np.ndarray, path: Path, count: int) -> None:
        """Writes which keys of a bucket, `table` (n, words) of `units` (n,) below `count`, are duplicates to `path`."""
        _, duplicates, _ = decide(table, self.group, units)
        write_duplicates(path, units[duplicates], table[duplicates, -1], count)

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        """The text without the items `duplicates`, or None if the document is dropped. Counts what is dropped.

        By default, a document with duplicates is dropped. One that is left without text is dropped too, and counted.
        """
        if not duplicates:
            return document.text
        tally.document(self.rule or f"duplicate_{self.name or type(self).__name__.lower()}", document.text)
        return None

    def found(self, corpus: Store, keys: str, duplicates: Sequence[str], unit: int) -> Found:
        """The duplicates in a unit, from the file of its own `keys` and the files of the `duplicates` of all units."""
        own = None if self.clusters else keys  # clusters have a unit's own pairs
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
    """The settings `given` of a step, of the class that it names. Raises ValueError if no installed package has it."""
    return named(given, "step", "dedup_steps", Step).config.model_validate(given) if isinstance(given, dict) else given


def rank(document: Document) -> int:
    """The rank of a document, smallest first: a hash of its URL, else of its id, so that no site is favoured."""
    return hash64(document.url or document.id)


def enough_left(text: str, document: Document, tally: Tally, min_sentences: int) -> str | None:
    """`text` if it still has `min_sentences`, counted over the whole text; else None. Counts a dropped document."""
    if not text:
        tally.document("empty_after_dedup", document.url or document.id)
    elif min_sentences and count_sentences(text, min_sentences) < min_sentences:
        tally.document("too_few_sentences_after_dedup", text)
    else:
        return text
    return None
