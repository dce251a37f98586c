"""Reads the documents of a unit as the earlier steps left them.

A step's keys are made from documents without what earlier steps dropped. Rules take each document by itself and have no
keys; they are applied when the next step reads. Each reading saves all changes so far to a table, so that the next
reading applies only the steps since then.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from data_pipeline.base.arrow_tables import rows_file
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.store import Store
from data_pipeline.dedup.keys import read_repeated
from data_pipeline.dedup.places import Places, Span
from data_pipeline.dedup.step import CONTENT, KeyStep
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names
from data_pipeline.text.document import Counts, Document, Tally
from data_pipeline.text.step import Row, Rule, Step

_CHANGED = tuple(one.name for one in fields(Document) if one.name not in ("id", "source"))
_SCHEMA = pa.schema(
    [("document", pa.int64()), ("dropped", pa.bool_())]
    + [(name, pa.large_string() if name == "text" else pa.string()) for name in _CHANGED]  # null: unchanged
)
_CHARACTERS_OF_A_ROW = 100
_NOTHING = (None,) * len(_CHANGED)
_values = attrgetter(*_CHANGED)


@dataclass(frozen=True)
class Decision:
    """A step, and what it has decided about a unit. The files are "" for a rule.

    Attributes:
        step: the step with its settings.
        keys: the file of the unit's keys.
        duplicates: the file that lists the files of duplicates of all units (`write_names`).
    """

    step: Step
    keys: str = ""
    duplicates: str = ""


@dataclass(frozen=True)
class Earlier:
    """The earlier steps of a unit.

    Attributes:
        unit: the unit's number, in the order of ids.
        spans: the records that the unit's documents were made of.
        changes: the table of changes; "": none.
        since: the steps that the table lacks, in order.
    """

    unit: int
    spans: list[Span]
    changes: str
    since: list[Decision]


class Reading:
    """Reads a unit's documents as the earlier steps left them."""

    def __init__(self, context: Context, earlier: Earlier):
        self._context, self._store, self._earlier = context, context.store, earlier

    def columns(self, own: Sequence[str]) -> list[str]:
        """The columns to read: a step's `own`, and those that the earlier steps need."""
        needed = ["id", *own]
        if self._earlier.changes:
            needed += _CHANGED  # a field that isn't read looks like one that a rule has emptied
        for step in (one.step for one in self._earlier.since if changes(one.step)):
            needed += [*step.columns, *CONTENT] if isinstance(step, KeyStep) else [one.name for one in fields(Document)]
        return [*dict.fromkeys(needed)]

    def rows(self, documents: Iterable[Document], tally: Tally) -> Iterator[Row]:
        """The unit's `documents`, in order, with what is left of each. Adds the counts of earlier steps to `tally`."""
        number = Places(self._earlier.spans).number
        rows: Iterator[Row] = ((number(document.id), document, document) for document in documents)
        if self._earlier.changes:
            rows = self._changed(rows, tally)
        for one in self._earlier.since:
            if isinstance(one.step, Rule):
                rows = one.step.left(self._context, rows, tally)
            elif isinstance(one.step, KeyStep) and one.step.drops:
                found = one.step.found(self._store, one.keys, _names(self._store, one), self._earlier.unit)
                rows = one.step.left(rows, found, tally)
        return rows

    def _changed(self, rows: Iterator[Row], tally: Tally) -> Iterator[Row]:
        """`rows` of unchanged documents, with the table's changes."""
        name = self._earlier.changes
        with pq.ParquetFile(self._store.readable(name)) as file:
            tally.add(parse_json(file.metadata.metadata[b"counts"], Counts, self._store.at(name)))
            changes = (row for group in range(file.num_row_groups) for row in file.read_row_group(group).to_pylist())
            change = next(changes, None)
            for number, document, left in rows:
                if change and change["document"] == number:
                    new = {name: change[name] for name in _CHANGED if change[name] is not None}
                    left = None if change["dropped"] else replace(document, **new)
                    change = next(changes, None)
                yield number, document, left

    @contextlib.contextmanager
    def write_changes(self, name: str, rows: Iterable[Row], tally: Tally) -> Iterator[Iterator[Row]]:
        """Passes `rows` through. Each row that the block takes is compared with the stored document, and a change is
        written to the table `name`. The counts of `tally` are added at the end. The table appears if the block ends
        without an error.

        A row of the table is a document that was dropped, or the fields that have other values than before. Rows have
        the order of the documents, so that both can be read side by side in bounded memory.
        """

        def noted() -> Iterator[Row]:
            for number, document, left in rows:
                if left is not document:
                    new = _NOTHING if left is None else _differences(document, left)
                    if left is None or new != _NOTHING:
                        characters = sum(map(len, filter(None, new)))
                        table.add((number, left is None, *new), _CHARACTERS_OF_A_ROW + characters)
                yield number, document, left

        with rows_file(self._store, name, _SCHEMA) as table:
            yield (remaining := noted())
            for _ in remaining:  # rows that the block hasn't read
                pass
            table.writer.add_key_value_metadata({"counts": to_json(tally.recorded())})

    def repeated(self) -> np.ndarray | None:
        """(n,): the sorted positions that the previous step found, if it has `drops = False`; else None."""
        last = self._earlier.since[-1] if self._earlier.since else None
        if last is None or changes(last.step):
            return None
        return read_repeated(self._store, last.keys, _names(self._store, last), self._earlier.unit)


def _differences(document: Document, left: Document) -> tuple[str | None, ...]:
    """The values of the fields in which `left` differs from `document`; None for the others."""
    pairs = zip(_values(document), _values(left), strict=True)
    return tuple(new if new != old else None for old, new in pairs)


def changes(step: Step) -> bool:
    """Whether a step changes or drops documents, rather than finding the places where the next step looks."""
    return not isinstance(step, KeyStep) or step.drops


def _names(store: Store, decision: Decision) -> Sequence[str]:
    return read_names(store, decision.duplicates) if decision.duplicates else ()
