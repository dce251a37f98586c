"""Shows a log on the terminal while it grows."""

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

_STDOUT = 1
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_FOR_THE_REST = 5.0


class Follower:
    """Writes to stdout what `log` gets within the block. By a thread: a terminal that is held up holds up nothing."""

    def __init__(self, log: Path):
        self._log, self._shown = log, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def _follow(self) -> None:
        while not self._done.wait(_SECONDS_BETWEEN_LOOKS):
            self._show()
        self._show()

    def _show(self) -> None:
        with contextlib.suppress(OSError), self._log.open("rb") as file:  # not there yet; or nobody reads us any more
            while new := os.pread(file.fileno(), 65536, self._shown):
                self._shown += os.write(_STDOUT, new)

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(_SECONDS_FOR_THE_REST)
