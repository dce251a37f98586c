"""Shows a growing log on the terminal, and warns when the disk refuses more log lines."""

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from pretrain.run import rank_logs

_STDOUT, _STDERR = 1, 2
_POLL_SECONDS = 0.2
_DELAY_SECONDS = 1.0  # in which a failure becomes known, whose cause is to be shown before what follows from it
_LOOKS_BETWEEN_PROBES = 25  # of the disk: 5 s
_SECONDS_FOR_THE_REST = 5.0


class Follower:
    """Copies new content of `log` to stdout within the block, in a thread: a blocked terminal blocks nothing.

    A second late, so that `hold` comes in time. `shown` counts the bytes that were shown.
    """

    def __init__(self, log: Path):
        self.shown = 0
        self._log = log
        self._refusal: str | None = None  # the disk's latest error
        self._done, self._held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def hold(self) -> None:
        """Shows nothing more: `show` does, once the cause of the failure has been shown."""
        self._held.set()

    def _follow(self) -> None:
        sizes: deque[tuple[float, int]] = deque()  # of the log, and when they were seen
        looks = 0
        while not self._done.wait(_POLL_SECONDS):
            sizes.append((time.monotonic(), self._log.stat().st_size if self._log.exists() else 0))
            while sizes and sizes[0][0] <= time.monotonic() - _DELAY_SECONDS and not self._held.is_set():
                self.shown = show(self._log, self.shown, sizes.popleft()[1])
            looks += 1
            if looks % _LOOKS_BETWEEN_PROBES == 0:
                self._probe()
        if not self._held.is_set():
            self.shown = show(self._log, self.shown)

    def _probe(self) -> None:
        before, self._refusal = self._refusal, rank_logs.refusal(self._log.parent)
        if self._refusal and self._refusal != before:
            warning = f"warning: {self._log.parent}: {self._refusal}; the run goes on, but its logs are incomplete\n"
            with contextlib.suppress(OSError):
                os.write(_STDERR, warning.encode())

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(_SECONDS_FOR_THE_REST)


def show(log: Path, start: int, end: int | None = None) -> int:
    """Copies `log` from byte `start` to `end` (None: its end) to stdout; returns where it stopped."""
    with contextlib.suppress(OSError), log.open("rb") as file:  # not created yet, or stdout is closed
        while new := os.pread(file.fileno(), 65536 if end is None else min(65536, end - start), start):
            start += os.write(_STDOUT, new)
    return start
