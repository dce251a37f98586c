"""RUN/lock: held by rank 0, so that no second run works in the same directory.

The kernel lets go of it when the process ends, however it ends; what the file says then means nothing any more.
"""

import os
import socket
from pathlib import Path
from typing import TextIO

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.locks import lock

_LOCK = "lock"


def take(run: Path) -> TextIO:
    """Locks `run` for as long as the file is open. Raises UserError naming the process that has it."""
    file = (run / _LOCK).open("a+")
    try:
        lock(file, f"{run}: nothing keeps a second run out of it; see that only one trains there")
    except BlockingIOError:
        raise _refusal(run, file) from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def check(run: Path) -> None:
    """Raises UserError if a run works in `run`."""
    if (run / _LOCK).exists():
        with (run / _LOCK).open() as file:
            try:
                lock(file, None, shared=True)  # `take` warns where there are no locks
            except BlockingIOError:
                raise _refusal(run, file) from None


def _refusal(run: Path, file: TextIO) -> UserError:
    file.seek(0)
    holder = file.read().strip() or "another process"
    return UserError(f"run.directory: {run}: {holder} trains here already")
