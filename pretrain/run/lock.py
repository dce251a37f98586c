"""RUN/lock: rank 0 locks it, so that no second run works in the same directory.

The kernel releases the lock when the process ends, however it ends; the file's content means nothing after that.
"""

import os
import socket
from pathlib import Path
from typing import TextIO, cast

from data_pipeline.foundation.atomic import lock
from data_pipeline.foundation.errors import UserError

_LOCK = "lock"


def take(run: Path) -> TextIO:
    """Locks `run` as long as the returned file is open. Raises UserError naming the process that holds the lock."""
    file = _opened(run, "a+")
    try:
        lock(file, f"{run}: nothing prevents a second run in this directory; make sure that only one trains there")
    except BlockingIOError:
        raise _refusal(run, file) from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def check(run: Path) -> None:
    """Raises UserError if a process trains in `run`."""
    if (run / _LOCK).exists():
        with _opened(run, "r") as file:
            try:
                lock(file, None, shared=True)  # `take` warns where there are no locks
            except BlockingIOError:
                raise _refusal(run, file) from None


def _opened(run: Path, mode: str) -> TextIO:
    try:
        return cast(TextIO, (run / _LOCK).open(mode))
    except OSError as error:
        raise UserError(f"run.directory: {run / _LOCK} can't be opened: {error.strerror}") from None


def _refusal(run: Path, file: TextIO) -> UserError:
    file.seek(0)
    holder = file.read().strip() or "another process"
    return UserError(f"run.directory: {run}: {holder} is already training here")
