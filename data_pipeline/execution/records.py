"""The records of a stage's finished units: one file, to which the driver adds a line for each unit.

A unit's line in `CORPUS/.stages/STAGE/finished.jsonl` commits the unit. It is added once the unit's files are on the
disk: the worker flushes their content, and the driver their folders and then the lines, at most once a second. So a
power cut may lose lines, whose units are then done again, but never a file that a line speaks of. The line of a unit
that is done again is removed first, since its files may have the same size under another config.

Earlier versions wrote a file for each unit, `STAGE/UNIT.json`. These are read, and become lines of the one file.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from data_pipeline.foundation.atomic import flush, write_bytes
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.foundation.threads import in_threads

FILE = "finished.jsonl"
_SECONDS_BETWEEN_FLUSHES = 1.0


@dataclass(frozen=True)
class _Named:
    name: str


class Records:
    """The records of the stage `name` of `corpus`; use as a context manager to `add` to them."""

    def __init__(self, corpus: Path, name: str):
        self._corpus, self._folder = corpus, corpus / ".stages" / name
        self._path = self._folder / FILE
        self._intact: set[str] | None = None  # the names that were read, if the file needs no repair
        self._waiting: list[Any] = []
        self._flushed = 0.0

    def read(self, kind: Any) -> dict[str, Any]:
        """The units, each a `kind`, by name, sorted as numbers are. Those of damaged lines are left out."""
        units = [_parsed(line, kind) for line in self._lines()]
        found = sorted(filter(None, units), key=lambda unit: (len(unit.name), unit.name))
        self._intact = {unit.name for unit in found} if None not in units and self._path.exists() else None
        return {unit.name: unit for unit in found}

    def remove(self, names: Collection[str]) -> None:
        """Removes the lines of the units `names`, and those that are damaged. The disk has it when this returns."""
        if self._intact is not None and self._intact.isdisjoint(names):
            return
        lines, kept = list(self._lines()), list[bytes]()
        for line in lines:
            if (unit := _parsed(line, _Named)) is not None and unit.name not in names:
                kept.append(line)
        former = self._former()
        if former or len(kept) < len(lines):
            write_bytes(self._path, b"".join(line + b"\n" for line in kept))
            for path in former:
                path.unlink()
        self._intact = None

    def __enter__(self) -> Callable[[Any], None]:
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            flush(self._folder.parent)
        self._file = self._path.open("ab", buffering=0)
        return self._add

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._flush()

    def _add(self, unit: Any) -> None:
        """Adds a unit whose files' content is on the disk."""
        self._waiting.append(unit)
        if time.monotonic() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = {str(Path(name).parent) for unit in self._waiting for name in unit.outputs}
        for folder in sorted({self._folder, *(self._corpus / name for name in names)}):
            flush(folder)
        lines = b"".join(to_json(unit) + b"\n" for unit in self._waiting)
        while lines:
            lines = lines[self._file.write(lines) :]
        flush(self._path)
        self._waiting, self._flushed = [], time.monotonic()

    def _lines(self) -> Iterator[bytes]:
        """Each unit's line; b"" for one that was cut, so that it counts as damaged."""
        if self._path.exists():
            with self._path.open("rb") as file:  # a line at a time: those of a crawl have a gigabyte
                for line in file:
                    yield line[:-1] if line.endswith(b"\n") else b""
        else:
            for content in in_threads(_content, self._former()):
                yield content.replace(b"\n", b" ")

    def _former(self) -> list[Path]:
        """The records that an earlier version wrote, one for each unit."""
        return list(self._folder.glob("*.json"))


def stages_of(corpus: Path) -> list[str]:
    """The stages that have records."""
    folders = {path.parent for pattern in (FILE, "*.json") for path in (corpus / ".stages").glob(f"*/{pattern}")}
    return sorted(folder.name for folder in folders)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _parsed(line: bytes, kind: Any) -> Any:
    try:
        return parse_json(line, kind, FILE)
    except FailedError:
        return None
