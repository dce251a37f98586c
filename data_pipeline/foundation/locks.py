"""Locks between processes: flock on an open file. The kernel releases it when the process ends, even if killed."""

import fcntl
import sys
from typing import IO, Any

_warned: set[str] = set()


def lock(file: IO[Any] | int, unprotected: str | None, *, shared: bool = False, wait: bool = False) -> None:
    """Locks `file` for as long as it is open. Raises BlockingIOError if another process holds the lock.

    With `wait`, it waits for the lock instead. With `shared`, other processes may hold a shared lock too. On a file
    system without locks, the process prints `unprotected` (what is at risk) once, as a warning, and continues; None
    prints nothing.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if unprotected and unprotected not in _warned:
            _warned.add(unprotected)
            print(f"warning: no file locks here ({error.strerror}): {unprotected}", file=sys.stderr)
