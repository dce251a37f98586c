"""Ends a rank that hangs, with the stacks of all its threads on stderr.

Code that makes progress calls `alive()`: a step, a validation batch, a phase of a save. A rank that starts or compiles
has a longer limit, because that time depends more on the machine than on the run.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator

from pretrain.run import rank_logs

GRACE = 20.0  # seconds that the Python thread has to report a hang before faulthandler does
_last = time.monotonic()
_starting, _compiling = True, False
_changed = threading.Event()  # set when _starting or _compiling changes, and with them the limit


def alive() -> None:
    """Notes that the rank has just made progress."""
    global _last
    _last = time.monotonic()


def starting() -> None:
    """From here to the end of the next step, the limit is `start_seconds`."""
    _now(starting=True, compiling=False)


def step_done() -> None:
    """Notes that a step has ended, and with it the start."""
    if _starting:
        _now(starting=False, compiling=False)
    alive()


def compiling(begins: bool) -> None:
    """Notes that a compilation begins or ends. During one, the limit is `start_seconds`."""
    _now(_starting, begins)


def _now(starting: bool, compiling: bool) -> None:
    global _starting, _compiling
    alive()
    _starting, _compiling = starting, compiling
    _changed.set()


@contextlib.contextmanager
def watching(rank: int, hang_seconds: float, start_seconds: float) -> Iterator[None]:
    """Within the block, ends the process with exit code 1 when it makes no progress within the limit.

    The limit is `start_seconds` at first and while the process compiles, else `hang_seconds`.
    """
    faulthandler.enable()  # so that a crash in native code prints its stacks too
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
        # native code that hangs while it holds the GIL stops this thread too; faulthandler's thread needs no GIL
        faulthandler.dump_traceback_later(left + GRACE, exit=True)
        _changed.wait(left)
    message = f"rank {rank}: no progress for {limit:g} s (faults.{key}); all stacks follow\n"
    os.write(2, message.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    rank_logs.note_failure(rank)
    os._exit(1)
