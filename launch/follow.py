"""Shows a log on the terminal while it grows."""

import contextlib
import os
from pathlib import Path

_STDOUT = 1


class Follower:
    def __init__(self, log: Path):
        self._log, self._shown = log, 0

    def show(self) -> None:
        """Writes to stdout what has been added."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
            self._shown += len(new)
            with contextlib.suppress(OSError):  # a terminal that went away is no reason to stop training
                os.write(_STDOUT, new)
