"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 5.0


def track(
    items: Iterable[Item], total: int, what: str, size: Callable[[Item], int] | None = None, total_size: int = 0
) -> Iterator[Item]:
    """Yields `items`, showing on stderr how many of `total` are through and how long the rest will take.

    `size`: bytes that an item stands for, of `total_size` in all; then bytes and their rate are shown too.
    """
    if sys.stderr.isatty():
        yield from _with_bar(items, total, what, size, total_size)
    else:
        yield from _with_lines(items, total, what, size, total_size)


def _with_bar(
    items: Iterable[Item], total: int, what: str, size: Callable[[Item], int] | None, total_size: int
) -> Iterator[Item]:
    by_size: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn()) if size else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *by_size, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total_size if size else total)
        for item in items:
            yield item
            progress.advance(task, size(item) if size else 1)


def _with_lines(
    items: Iterable[Item], total: int, what: str, size: Callable[[Item], int] | None, total_size: int
) -> Iterator[Item]:
    started = shown = time.monotonic()
    done = 0
    for count, item in enumerate(items, 1):
        yield item
        done += size(item) if size else 1
        now = time.monotonic()
        if now - shown < _SECONDS_BETWEEN_LINES or count == total:
            continue
        shown, seconds = now, now - started
        left = seconds * ((total_size if size else total) - done) / done if done else 0
        rate = f", {done / 1e6 / seconds:.1f} MB/s" if size else ""
        print(f"{what}: {count}/{total}, {seconds:.0f} s{rate}, {left:.0f} s left", file=sys.stderr, flush=True)
