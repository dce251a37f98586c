"""Reads the documents of a unit as the earlier deduplication steps left them.

A step's keys are made from documents without the duplicates of earlier steps. Each reading saves all changes so far to
a table, so that the next reading applies only the decisions since then. `Filters` and `Decontamination` take each
document by itself and have no keys; they are applied in the reading after the last step.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from data_pipeline.base.arrow_tables import rows_file
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.store import Store
from data_pipeline.dedup.config import DedupConfig, step_of
from data_pipeline.dedup.decontamination import Decontamination, Index
from data_pipeline.dedup.keys import read_repeated
from data_pipeline.dedup.step import CONTENT, Found, Row, Step
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.cleaning.page import PageFilters
from data_pipeline.text.document import Counts, Document, Tally

_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("dropped", pa.bool_()),
        ("text", pa.large_string()),  # null: unchanged
        ("language", pa.string()),  # "": unchanged
    ]
)
_CHARACTERS_OF_A_ROW = 100


class Filters(Step):
    """Applies `PageFilters`: drops a document for its language, bad words or the classifier, and sets its language."""

    name = "filters"
    version = 4

    def __init__(self, cleaning: CleaningConfig):
        self._language_of = PageFilters(cleaning)

    def left(self, rows: Iterable[Row], found: Found, tally: Tally, min_sentences: int) -> Iterator[Row]:
        for number, document, left in rows:
            if left is not None:
                language = self._language_of(left.text, left.url, left.language, tally)
                left = None if language is None else replace(left, language=language)
            yield number, document, left


WITHOUT_KEYS: dict[str, type[Step]] = {Filters.name: Filters, Decontamination.name: Decontamination}
"""The steps that take each document by itself."""


def opened(context: Context, name: str, dedup: DedupConfig, cleaning: CleaningConfig) -> Step:
    """Any step, for documents that `cleaning` cleaned."""
    if name == Filters.name:
        return Filters(cleaning)
    if name == Decontamination.name:
        return Decontamination(context.cached("n-grams", lambda: Index.read(context.store)))
    return step_of(name, dedup)


@dataclass(frozen=True)
class Decision:
    """A step's decision about a unit. The files are "" for a step without keys.

    Attributes:
        step: the step's name.
        keys: the file of the unit's keys.
        duplicates: the file that lists the files of duplicates of all units (`write_names`).
    """

    step: str
    keys: str
    duplicates: str


@dataclass(frozen=True)
class Earlier:
    """The decisions of the earlier steps about a unit.

    Attributes:
        unit: the unit's number, in the order of ids.
        cleaning, dedup: their settings.
        changes: the table of changes; "": none.
        since: the decisions that the table lacks, in the order of the steps.
    """

    unit: int
    cleaning: CleaningConfig
    dedup: DedupConfig
    changes: str
    since: list[Decision]


class Reading:
    """Reads a unit's documents as the earlier steps left them. `steps`: the steps that the table of changes lacks."""

    def __init__(self, context: Context, earlier: Earlier):
        self._corpus, self._earlier = context.store, earlier
        self.steps = [opened(context, one.step, earlier.dedup, earlier.cleaning) for one in earlier.since]

    def columns(self, own: Sequence[str]) -> list[str]:
        """The columns to read: a step's `own`, and those that `steps` need."""
        applied = (step for step in self.steps if step.drops)
        return [*dict.fromkeys([*own, *(column for step in applied for column in (*step.columns, *CONTENT))])]

    def rows(self, documents: Iterable[Document], tally: Tally) -> Iterator[Row]:
        """The unit's `documents`, in order, with what is left of each. Adds the counts of earlier steps to `tally`."""
        rows: Iterator[Row] = ((number, document, document) for number, document in enumerate(documents))
        if self._earlier.changes:
            rows = self._changed(rows, tally)
        for step, one in zip(self.steps, self._earlier.since, strict=True):
            if step.drops:
                found = step.found(self._corpus, one.keys, _names(self._corpus, one), self._earlier.unit)
                rows = step.left(rows, found, tally, self._earlier.cleaning.min_sentences_per_page)
        return rows

    def _changed(self, rows: Iterator[Row], tally: Tally) -> Iterator[Row]:
        """`rows` of unchanged documents, with the table's changes."""
        name = self._earlier.changes
        with pq.ParquetFile(self._corpus.readable(name)) as file:
            tally.add(parse_json(file.metadata.metadata[b"counts"], Counts, self._corpus.at(name)))
            changes = (row for group in range(file.num_row_groups) for row in file.read_row_group(group).to_pylist())
            change = next(changes, None)
            for number, document, left in rows:
                if change and change["document"] == number:
                    text, language = change["text"], change["language"] or document.language
                    gone = change["dropped"]
                    left = None if gone else replace(document, text=text or document.text, language=language)
                    change = next(changes, None)
                yield number, document, left

    @contextlib.contextmanager
    def write_changes(self, name: str, rows: Iterable[Row], tally: Tally) -> Iterator[Iterator[Row]]:
        """Passes `rows` through. Each row that the block takes is compared with the stored document, and a change is
        written to the table `name`. The counts of `tally` are added at the end. The table appears if the block ends
        without an error.

        A row of the table is a document that was dropped or that has another text or language than before. Rows have
        the order of the documents, so that both can be read side by side in bounded memory.
        """

        def noted() -> Iterator[Row]:
            for number, document, left in rows:
                text = None if left is None or left.text == document.text else left.text
                language = "" if left is None or left.language == document.language else left.language
                if left is None or text is not None or language:
                    table.add((number, left is None, text, language), _CHARACTERS_OF_A_ROW + len(text or ""))
                yield number, document, left

        with rows_file(self._corpus, name, _SCHEMA) as table:
            yield (remaining := noted())
            for _ in remaining:  # rows that the block hasn't read
                pass
            table.writer.add_key_value_metadata({"counts": to_json(tally.recorded())})

    def repeated(self) -> np.ndarray | None:
        """(n,): the sorted positions that the previous step found, if it has `drops = False`; else None."""
        if not self.steps or self.steps[-1].drops:
            return None
        last = self._earlier.since[-1]
        return read_repeated(self._corpus, last.keys, _names(self._corpus, last), self._earlier.unit)


def _names(corpus: Store, decision: Decision) -> Sequence[str]:
    return read_names(corpus, decision.duplicates) if decision.duplicates else ()
