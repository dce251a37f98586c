"""Ends a rank that hangs, with the stacks of all its threads on stderr.

Whatever makes progress calls `alive()`: a step, a validation batch, a phase of a save.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator

from pretrain import rank_logs

GRACE = 20.0  # seconds more for a thread of Python's to speak, before faulthandler does without any
_last = time.monotonic()


def alive() -> None:
    """Something was done just now."""
    global _last
    _last = time.monotonic()


@contextlib.contextmanager
def watching(rank: int, seconds: float) -> Iterator[None]:
    """Within the block, the process ends with exit code 1 once nothing was done for so many `seconds`."""
    faulthandler.enable()  # a crash in native code leaves its stacks as well
    done = threading.Event()
    alive()
    thread = threading.Thread(target=_watch, args=(rank, seconds, done), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(rank: int, seconds: float, done: threading.Event) -> None:
    while (left := _last + seconds - time.monotonic()) > 0:
        # native code that hangs with the GIL stops this thread as well; faulthandler's needs no GIL
        faulthandler.dump_traceback_later(left + GRACE, exit=True)
        if done.wait(left):
            return
    told = f"rank {rank}: nothing done for {seconds:g} s (faults.hang_seconds); all stacks follow\n"
    os.write(2, told.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    rank_logs.note_failure(rank)
    os._exit(1)
