"""Shows a growing log on the terminal, and warns when the disk refuses more log lines."""

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

from pretrain.run import rank_logs

_STDOUT, _STDERR = 1, 2
_POLL_SECONDS = 0.2
_LOOKS_BETWEEN_PROBES = 25  # of the disk: 5 s
_SECONDS_FOR_THE_REST = 5.0


class Follower:
    """Copies new content of `log` to stdout within the block, in a thread: a blocked terminal blocks nothing."""

    def __init__(self, log: Path):
        self._log, self._shown = log, 0
        self._refusal: str | None = None  # the disk's latest error
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def _follow(self) -> None:
        looks = 0
        while not self._done.wait(_POLL_SECONDS):
            self._show()
            looks += 1
            if looks % _LOOKS_BETWEEN_PROBES == 0:
                self._probe()
        self._show()

    def _probe(self) -> None:
        before, self._refusal = self._refusal, rank_logs.refusal(self._log.parent)
        if self._refusal and self._refusal != before:
            warning = f"warning: {self._log.parent}: {self._refusal}; the run goes on, but its logs are incomplete\n"
            with contextlib.suppress(OSError):
                os.write(_STDERR, warning.encode())

    def _show(self) -> None:
        with contextlib.suppress(OSError), self._log.open("rb") as file:  # not created yet, or stdout is closed
            while new := os.pread(file.fileno(), 65536, self._shown):
                self._shown += os.write(_STDOUT, new)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(_SECONDS_FOR_THE_REST)
