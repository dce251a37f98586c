"""Ends a rank that hangs, with the stacks of all its threads on stderr.

Whatever makes progress calls `alive()`: a step, a validation batch, a phase of a save. A rank that starts or compiles
is given longer: how long that takes says more about the machine than about the run.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator

from pretrain.run import rank_logs

GRACE = 20.0  # seconds more for a thread of Python's to speak, before faulthandler does without any
_last = time.monotonic()
_starting, _compiling = True, False
_changed = threading.Event()  # what the rank is about, and with it how long it is given


def alive() -> None:
    """Something was done just now."""
    global _last
    _last = time.monotonic()


def starting() -> None:
    """From here on up to the end of the next step the rank may take `start_seconds` for whatever it does."""
    _now(starting=True, compiling=False)


def step_done() -> None:
    """A step was done just now, so the rank has started."""
    if _starting:
        _now(starting=False, compiling=False)
    alive()


def compiling(begins: bool) -> None:
    """A compilation begins, which may take `start_seconds` as well; or it ends."""
    _now(_starting, begins)


def _now(starting: bool, compiling: bool) -> None:
    global _starting, _compiling
    alive()
    _starting, _compiling = starting, compiling
    _changed.set()


@contextlib.contextmanager
def watching(rank: int, hang_seconds: float, start_seconds: float) -> Iterator[None]:
    """Within the block the process ends with exit code 1 once nothing was done for so long. It begins with a start."""
    faulthandler.enable()  # a crash in native code leaves its stacks as well
    done = threading.Event()
    starting()
    thread = threading.Thread(
        target=_watch, args=(rank, hang_seconds, start_seconds, done), name="watchdog", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        _changed.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(rank: int, hang_seconds: float, start_seconds: float, done: threading.Event) -> None:
    while True:
        _changed.clear()
        if done.is_set():
            return
        key, limit = ("start_seconds", start_seconds) if _starting or _compiling else ("hang_seconds", hang_seconds)
        left = _last + limit - time.monotonic()
        if left <= 0:
            break
        # native code that hangs with the GIL stops this thread as well; faulthandler's needs no GIL
        faulthandler.dump_traceback_later(left + GRACE, exit=True)
        _changed.wait(left)
    told = f"rank {rank}: nothing done for {limit:g} s (faults.{key}); all stacks follow\n"
    os.write(2, told.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    rank_logs.note_failure(rank)
    os._exit(1)
