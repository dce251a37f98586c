"""Progress of long work: workers write how far they are, and the driver shows it on stderr.

A terminal gets a bar beside a line, anything else a line every few seconds.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():  # 150 ms and 9 MB, for a terminal alone
    from rich import console, live, progress_bar, table

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_WRITES = 10.0, 1.0
_BAR_WIDTH = 20  # characters


@dataclass
class Progress:
    """How far some work is: in bytes if `size`, its total, is known, else in items.

    `in_progress` returns the bytes done of unfinished items. `doing` returns what is done now, which a single item
    without a size shows in place of 0/1.
    """

    what: str
    total: int
    size: int = 0
    in_progress: Callable[[], int] = lambda: 0
    doing: Callable[[], str] = str
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _finished: int = 0

    def __post_init__(self) -> None:
        self._started = self.clock()

    def finish(self, size: int) -> None:
        """Counts one finished item of `size` bytes."""
        self.count += 1
        self._finished += size

    def done(self) -> int:
        """The bytes (or items) done, of which a worker that died may have counted more."""
        return min(self.size, self._finished + self.in_progress()) if self.size else self.count

    def line(self) -> str:
        """The progress as one line."""
        done, seconds = self.done(), self.clock() - self._started
        doing = self.doing() if self.total == 1 and not self.size else ""
        words = [f"{self.what}: {doing or f'{self.count}/{self.total}'}"]
        if self.size:
            words.append(f"{done / 1e6:,.0f} of {self.size / 1e6:,.0f} MB")
        words.append(f"{seconds:.0f} s")
        if done and seconds:
            rate = done / seconds
            if self.size:
                words.append(f"{rate / 1e6:.1f} MB/s")
            words.append(f"{((self.size or self.total) - done) / rate:.0f} s left")
        return ", ".join(words)


def track(
    items: Iterable[Item],
    total: int,
    what: str,
    size: Callable[[Item], int] | None = None,
    total_size: int = 0,
    in_progress: Callable[[], int] = lambda: 0,
    doing: Callable[[], str] = str,
) -> Iterator[Item]:
    """Yields `items`, and shows on stderr how many of `total` are done and how long the rest will take.

    With `size`, the bytes of an item, and their sum `total_size`, it also shows the bytes done, those `in_progress`
    included, and their rate. For `doing` see Progress.
    """
    progress = Progress(what, total, total_size if size else 0, in_progress, doing)
    with _bar(progress) if sys.stderr.isatty() else _lines(progress):
        for item in items:
            yield item
            progress.finish(size(item) if size else 1)


@contextlib.contextmanager
def _bar(progress: Progress) -> Iterator[None]:
    def bar_and_line() -> "table.Table":
        row = table.Table.grid(padding=(0, 1))
        bar = progress_bar.ProgressBar(progress.size or progress.total, progress.done(), width=_BAR_WIDTH)
        row.add_row(bar, progress.line())
        return row

    with live.Live(console=console.Console(stderr=True), refresh_per_second=2, get_renderable=bar_and_line):
        yield


@contextlib.contextmanager
def _lines(progress: Progress) -> Iterator[None]:
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            print(progress.line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _ProgressFile:
    """The file to which a worker writes how many bytes of its unit are done, and what it does now."""

    def __init__(self, path: Path):
        self.path, self.done, self.doing, self.written = path, 0, "", 0.0

    def write(self) -> None:
        self.written = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk will be reported by the unit itself
            self.path.write_text(f"{self.done} {self.doing}")


_current: _ProgressFile | None = None  # of the unit that this process works on


@contextlib.contextmanager
def reporting_progress(path: Path) -> Iterator[None]:
    """In a worker: writes what `advance` counts within the block to the file `path`, which is removed at the end."""
    global _current
    _current = _ProgressFile(path)
    _current.write()
    try:
        yield
    finally:
        _current = None
        with contextlib.suppress(OSError):
            path.unlink()


def advance(size: int) -> None:
    """Counts `size` more bytes of input as read. Does nothing outside a `reporting_progress` block."""
    if _current is not None:
        _current.done += size
        if time.monotonic() - _current.written >= _SECONDS_BETWEEN_WRITES:
            _current.write()


def set_activity(what: str) -> None:
    """Records what the unit does now: "training on 38 MB of text". Does nothing outside `reporting_progress`."""
    if _current is not None:
        _current.doing = what
        _current.write()


def bytes_done(folder: Path) -> int:
    """The bytes done by all workers that have a file in `folder`."""
    return sum(_written(path)[0] for path in folder.glob("*"))


def activity(folder: Path) -> str:
    """What a worker that has a file in `folder` does now; "" if none says so."""
    return next(filter(None, map(last_activity, folder.glob("*"))), "")


def last_activity(path: Path) -> str:
    """What the worker that writes the file `path` does, or did when it died; "" if it didn't say."""
    return _written(path)[1]


def _written(path: Path) -> tuple[int, str]:
    try:
        done, _, doing = path.read_text().partition(" ")
        return int(done), doing
    except (OSError, ValueError):  # removed, or being written at this moment
        return 0, ""
