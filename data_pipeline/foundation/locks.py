"""Locks between processes: flock on an open file. The kernel lets go of it with the process, however that ends."""

import fcntl
import sys
from typing import IO, Any

_warned: set[str] = set()


def lock(file: IO[Any] | int, unprotected: str | None, *, shared: bool = False, wait: bool = False) -> None:
    """Locks `file` for as long as it is open, alone or `shared`. Raises BlockingIOError where another has it.

    `wait`: until nobody else has it. `unprotected`: what goes without protection on a file system that has no locks;
    this process says so once, and goes on. None: another process has said it.
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
