"""The progress of a download of many files: a bar on a terminal, else a plain line every few seconds."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from data_pipeline.foundation.formatting import duration, human_size

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_OF_RATE = 30.0


class DownloadMeter:
    """Counts bytes and files from several threads. The total is estimated from the files whose size is known."""

    def __init__(self, what: str, files: int):
        self.what, self.files = what, files
        self.files_done = self.bytes_done = self.bytes_received = 0
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._shown = time.monotonic()
        self._progress: Progress | None = None

    def expect(self, path: str, size: int | None) -> None:
        if size is not None:
            with self._lock:
                self._sizes[path] = size

    def add(self, count: int, received: bool = False) -> None:
        """Adds `count` bytes, negative for discarded ones. `received`: whether they came from the network just now."""
        with self._lock:
            self.bytes_done += count
            self.bytes_received += count if received else 0

    def finish_file(self) -> None:
        with self._lock:
            self.files_done += 1

    def bytes_in_all(self) -> float | None:
        with self._lock:
            return sum(self._sizes.values()) / len(self._sizes) * self.files if self._sizes else None

    def line(self) -> str:
        """The progress as a line: `fetch: 12/56,000 files, 1.8 GB of about 8,400 GB, 35.1 MB/s, 66 h 28 min left`."""
        now, total = time.monotonic(), self.bytes_in_all()
        self._samples.append((now, self.bytes_received))
        while len(self._samples) > 2 and now - self._samples[1][0] > _SECONDS_OF_RATE:
            self._samples.popleft()
        since, received = self._samples[0]
        rate = (self.bytes_received - received) / max(now - since, 1e-3)
        line = f"{self.what}: {self.files_done:,}/{self.files:,} files, {human_size(self.bytes_done)}"
        if total:
            line += f" of {'' if len(self._sizes) == self.files else 'about '}{human_size(total)}"
        line += f", {human_size(rate)}/s"
        return line + (f", {duration((total - self.bytes_done) / rate)} left" if total and rate > 0 else "")

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Within this block, `show` draws a bar if stderr is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        columns = (BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as self._progress:
            self._progress.add_task(self.line(), total=None)
            try:
                yield
            finally:
                self._progress = None

    def show(self) -> None:
        """Updates what is shown. Call it often."""
        now = time.monotonic()
        if self._progress:
            task = self._progress.task_ids[0]
            self._progress.update(task, description=self.line(), completed=self.bytes_done, total=self.bytes_in_all())
        elif now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            self.note(self.line())

    def note(self, line: str) -> None:
        """Prints a line that stays on the screen."""
        if self._progress:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
