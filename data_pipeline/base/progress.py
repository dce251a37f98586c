"""Progress of long work: workers report it, and the driver shows it on stderr.

A terminal shows a bar beside a line. Any other output gets a line every ten seconds.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES, _SECONDS_BETWEEN_REPORTS = 10.0, 5.0
_BAR_WIDTH = 20  # characters


@dataclass
class Progress:
    """Progress of `total` items. `size`: their bytes, if known; progress is then shown in bytes.

    `in_progress` returns the bytes that are done of unfinished items. `doing` returns the current activity, which is
    shown in place of 0/1 for a single item without a size.
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
        """The bytes (or items) that are done, at most all: a worker that died may have counted too many."""
        return min(self.size, self._finished + self.in_progress()) if self.size else self.count

    def line(self, done: int | None = None) -> str:
        """The progress as one line. `done`: the result of `done()`, if it is known."""
        done, seconds = self.done() if done is None else done, self.clock() - self._started
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


def track(items: Iterable[Item], progress: Progress, size: Callable[[Item], int] = lambda item: 0) -> Iterator[Item]:
    """Yields `items`; shows on stderr how many are done and how long the rest will take. `size` gives an item's
    bytes."""
    with _bar(progress) if sys.stderr.isatty() else _lines(progress):
        for item in items:
            yield item
            progress.finish(size(item))


@contextlib.contextmanager
def _bar(progress: Progress) -> Iterator[None]:
    from rich import console, live, progress_bar, table  # 150 ms and 9 MB, for a terminal alone

    def bar_and_line() -> "table.Table":
        row, done = table.Table.grid(padding=(0, 1)), progress.done()
        bar = progress_bar.ProgressBar(progress.size or progress.total, done, width=_BAR_WIDTH)
        row.add_row(bar, progress.line(done))
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


@dataclass
class Activity:
    """The current work of a worker.

    Attributes:
        unit: the unit of work.
        tries: how many tries of the unit failed before.
        done: the bytes of input that the worker has read.
        doing: the current step in words: "training on 38 MB of text".
        file: the input file that is being read, by the name that the unit has for it; "" if none.
    """

    unit: str
    tries: int = 0
    done: int = 0
    doing: str = ""
    file: str = ""

    def advance(self, size: int) -> None:
        """Counts `size` more bytes of input as read."""
        self.done += size


class Board:
    """The last reported activity of each worker; a worker is a process of a node."""

    def __init__(self) -> None:
        self._by_worker: dict[tuple[str, int], Activity] = {}

    def begin(self, node: str, process: int, unit: str, tries: int) -> None:
        """Like `note`, for a worker that has imported nothing yet."""
        self.note(node, process, Activity(unit, tries))

    def note(self, node: str, process: int, activity: Activity) -> None:
        self._by_worker.pop((node, process), None)  # so that the newest comes last
        self._by_worker[node, process] = activity

    def by_unit(self) -> dict[str, tuple[str, Activity]]:
        """The node and the last activity of each unit. Finished units may be among them."""
        return {activity.unit: (node, activity) for (node, _), activity in self._by_worker.items()}


class Reporter:
    """Sends what this process does, every few seconds. Its thread stays, since a new thread for each unit would take as
    long as a short unit."""

    def __init__(self) -> None:
        self._send: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._report, name="progress", daemon=True)

    @contextlib.contextmanager
    def reporting(self, send: Callable[[], object]) -> Iterator[None]:
        """Within the block, calls `send` every few seconds, and perhaps once just after the block."""
        if not self._thread.is_alive():
            self._thread.start()
        self._send = send
        try:
            yield
        finally:
            self._send = None

    def _report(self) -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_REPORTS)
            if (send := self._send) is not None:
                send()


_doing = ""  # of this process's command


@contextlib.contextmanager
def activity_shown(first: str) -> Iterator[None]:
    """Within the block, a terminal shows what the command does, at first `first`, and since when. Any other output gets
    nothing."""
    set_activity(first)
    if not sys.stderr.isatty():
        yield
        return
    from rich import console, live, text  # 150 ms and 9 MB, for a terminal alone

    started = time.monotonic()
    shown = live.Live(
        console=console.Console(file=sys.stderr),  # also if a function redirects stderr afterwards
        transient=True,
        refresh_per_second=2,
        redirect_stdout=sys.stdout.isatty(),
        get_renderable=lambda: text.Text(f"{_doing}, {time.monotonic() - started:.0f} s"),
    )
    with shown:
        shown.refresh()  # at once, not after half a second
        yield


def set_activity(what: str) -> None:
    """Sets what `activity_shown` shows: "measuring this machine"."""
    global _doing
    _doing = what
