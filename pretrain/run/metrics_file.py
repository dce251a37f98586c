"""Writes and reads RUN/metrics.jsonl: every metric of a run, one line per log step, appended by rank 0.

Every tool that shows curves is fed from metrics.jsonl. A line is

    {"step": 10, "attempt": 1, "time": 1767225600.0, "metrics": {"train/loss": 9.81, "train/gradient_norm": "NaN"}}

JSON has no NaN and no infinity. They are written as the strings "NaN", "Infinity" and "-Infinity", which `float()`
reads back.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_pipeline.base.atomic import strict_json

FILE_NAME = "metrics.jsonl"
_TAIL = 1 << 16  # bytes: far more than the longest line
_LARGEST = 1 << 63  # steps and milliseconds: larger numbers are damage


@dataclass(frozen=True)
class Row:
    """A line. `time`: seconds since 1970. `attempt`: the number of the start of the run, from 1."""

    step: int
    attempt: int
    time: float
    metrics: dict[str, float]


class MetricLog:
    """Appends rows to RUN/metrics.jsonl, without buffering. An incomplete last line of a crashed attempt is removed
    first."""

    def __init__(self, run_dir: Path, attempt: int):
        self.path = run_dir / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.attempt = attempt
        self._unwritten = b""
        _mend_last_line(self.path)
        # unbuffered, so that a kill after log() loses no row
        self._file = self.path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row. Raises OSError if the disk refuses the row, which is then written with the next one."""
        values = strict_json({name: float(value) for name, value in metrics.items()})
        row = {"step": step, "attempt": self.attempt, "time": round(time.time(), 3), "metrics": values}
        self._unwritten += json.dumps(row, ensure_ascii=False).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes the rows that an earlier error left unwritten."""
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """Reads one row per step from `path` (a run directory or its metrics.jsonl), by ascending step.

    Rows of the same step are merged. If several attempts logged a metric for a step, the last attempt's value counts.

    >>> read_metrics(path)  # attempt 1 reached step 20, attempt 2 resumed from a checkpoint of step 10
    [Row(step=10, attempt=1, …), Row(step=20, attempt=2, …)]
    """
    by_step: dict[int, Row] = {}
    rows = (row for row, _ in rows_from(path / FILE_NAME if path.is_dir() else path))
    for row in sorted(rows, key=lambda row: row.attempt):  # stable: within an attempt the later line counts
        before = by_step.get(row.step)
        metrics = {**before.metrics, **row.metrics} if before else row.metrics
        by_step[row.step] = Row(row.step, row.attempt, row.time, metrics)
    return [by_step[step] for step in sorted(by_step)]


def rows_from(path: Path, offset: int = 0) -> Iterator[tuple[Row, int]]:
    """Yields the rows from byte `offset` on in the order of the file, each with the offset after its line.

    Ends before a last line that is still being written, and skips lines that aren't rows.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            if row := _parse(line):
                yield row, offset


def _parse(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
        metrics = {name: float(number) for name, number in value["metrics"].items()}
        row = Row(int(value["step"]), int(value["attempt"]), float(value["time"]), metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return row if abs(row.step) < _LARGEST and 0 <= row.time < _LARGEST / 1000 else None


def last_row(path: Path) -> Row | None:
    """The last row of the file; None if it has no row or can't be read."""
    return next(reversed(last_rows(path)), None)


def last_rows(path: Path) -> list[Row]:
    """The rows in the last 64 KiB of the file; [] if it has no row or can't be read."""
    try:
        with path.open("rb") as file:
            rows = [_parse(line) for line in _tail(file)[1].splitlines()]
    except OSError:
        return []
    return [row for row in rows if row]


def _tail(file: BinaryIO) -> tuple[int, bytes]:
    """The end of a file, with the offset at which it begins."""
    start = max(0, file.seek(0, os.SEEK_END) - _TAIL)
    file.seek(start)
    return start, file.read()


def _mend_last_line(path: Path) -> None:
    """Makes the file end with a complete line: adds a missing newline, or cuts off an incomplete line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        start, tail = _tail(file)
        whole = tail.rfind(b"\n") + 1
        if whole == len(tail):
            return
        if _parse(tail[whole:]):
            file.write(b"\n")
        else:
            file.truncate(start + whole)
