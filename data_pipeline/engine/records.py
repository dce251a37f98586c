"""The records of a stage's finished units: one file, to which the driver adds a line for each unit.

A line in `CORPUS/.stages/STAGE/finished.jsonl` commits its unit. It is added once the unit's files are on the disk: the
worker flushes the files' content, and the driver their folders and then the lines, at most once a second. A power cut
may lose lines, and their units are then done again; it never loses a file that a line names. In a bucket, each addition
is an object. Before a unit is done again its line is removed, since its files may have the same size under another
config.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from data_pipeline.base.errors import FailedError
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.store import Store

FILE = "finished.jsonl"
_SECONDS_BETWEEN_FLUSHES = 1.0


@dataclass(frozen=True)
class _Named:
    name: str


class Records:
    """The records of the stage `name` of `store`. As a context manager, gives a function that adds a unit."""

    def __init__(self, store: Store, name: str):
        self._store, self._file = store, f".stages/{name}/{FILE}"
        self._intact: set[str] | None = None  # the names in the file, if no line is damaged
        self.waiting: list[Any] = []  # units whose lines aren't written yet
        self._flushed = 0.0

    def each(self, kind: Any) -> Iterator[Any]:
        """The units, each a `kind`, in the order in which they were added; a unit that was added twice counts once.

        Raises FailedError if a line is damaged.
        """
        seen = set[str]()
        for line in self._store.lines(self._file):
            unit = parse_json(line, kind, self._file)
            if unit.name not in seen:
                seen.add(unit.name)
                yield unit

    def read(self, kind: Any) -> dict[str, Any]:
        """The units, each a `kind`, by name, in numerical order. Damaged lines are left out."""
        units = [_parsed(line, kind) for line in self._store.lines(self._file)]
        found = sorted(filter(None, units), key=lambda unit: (len(unit.name), unit.name))
        self._intact = {unit.name for unit in found} if None not in units else None
        return {unit.name: unit for unit in found}

    def remove(self, names: Collection[str]) -> None:
        """Removes the lines of the units `names` and damaged lines; they stay removed after a power cut."""
        if self._intact is not None and self._intact.isdisjoint(names):
            return
        lines, kept = [*self._store.lines(self._file)], list[bytes]()
        for line in lines:
            if (unit := _parsed(line, _Named)) is not None and unit.name not in names:
                kept.append(line)
        if len(kept) < len(lines):
            self._store.replace_lines(self._file, b"".join(line + b"\n" for line in kept))
        self._intact = None

    def __enter__(self) -> Callable[[Any], None]:
        return self._add

    def __exit__(self, *_: object) -> None:
        self._flush()

    def _add(self, unit: Any) -> None:
        """Adds a unit; the content of its files must be on the disk."""
        self.waiting.append(unit)
        if time.monotonic() - self._flushed > max(_SECONDS_BETWEEN_FLUSHES, self._store.seconds_between_appends):
            self._flush()

    def _flush(self) -> None:
        if not self.waiting:
            return
        lines = b"".join(to_json(unit) + b"\n" for unit in self.waiting)
        self._store.append(self._file, lines, {name for unit in self.waiting for name in unit.outputs})
        self.waiting, self._flushed = [], time.monotonic()


def _parsed(line: bytes, kind: Any) -> Any:
    try:
        return parse_json(line, kind, FILE)
    except FailedError:
        return None
