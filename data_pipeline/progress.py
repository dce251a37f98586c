"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")
_SECONDS_BETWEEN_LINES = 5.0


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yields `items`, showing on stderr how many of `total` are through."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            task = progress.add_task(what, total=total)
            for item in items:
                yield item
                progress.advance(task)
        return
    started = shown = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= _SECONDS_BETWEEN_LINES and count < total:
            shown = now
            print(f"{what}: {count}/{total}, {now - started:.0f} s", file=sys.stderr, flush=True)
