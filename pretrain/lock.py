"""RUN/lock: held by rank 0, so that no second run works in the same directory.

The kernel lets go of it when the process ends, however it ends; what the file says then means nothing any more.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from data_pipeline.errors import UserError

_LOCK = "lock"


def take(run: Path) -> TextIO:
    """Locks `run` for as long as the file is open. Raises UserError naming the process that has it."""
    file = (run / _LOCK).open("a+")
    _lock(file, fcntl.LOCK_EX, run)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def check(run: Path) -> None:
    """Raises UserError if a run works in `run`."""
    if (run / _LOCK).exists():
        with (run / _LOCK).open() as file:
            _lock(file, fcntl.LOCK_SH, run)


def _lock(file: TextIO, kind: int, run: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise UserError(f"run.directory: {run}: {holder} trains here already") from None
