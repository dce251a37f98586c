"""Ends a rank that hangs, and prints the stacks of all its threads to stderr.

Code that makes progress calls `alive()`: a step, a validation batch, a phase of a save. The timeout follows the time
that steps take. It is longer while a rank starts, compiles, loads, saves or evaluates, which depends on other things.
"""

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from pretrain.run import heartbeat


class Store(Protocol):
    """A counter that all ranks see: `torch.distributed.TCPStore`."""

    def add(self, key: str, amount: int, /) -> int: ...


SECONDS_TO_LOOK = 0.3  # that the supervisor has to see how the ranks stand before this one's end changes it
GRACE = 20.0  # seconds that the Python thread has to report a hang before faulthandler does
LEAST_SECONDS, STEPS = 120.0, 20  # a hang is at least that long, and as long as that number of steps
_last = _last_step = time.monotonic()
_steps: deque[float] = deque(maxlen=5 * STEPS)  # seconds of the latest steps; of the first after a start, none
_phases = {"starting"}  # that this rank is in: "starting", "compiling", "slow phase", "unwatched"
_shared: Store | None = None  # where the ranks count how many of them compile
_COMPILING = "watchdog/compiling"
_changed = threading.Event()  # set when these change, and with them the limit


def alive() -> None:
    """Notes that the rank has just made progress."""
    global _last
    _last = time.monotonic()


def starting() -> None:
    """From here to the end of the next step, the limit is `start_seconds`. For starts, and before loading."""
    _set("compiling", False)
    _set("starting", True)


def step_done() -> None:
    """Notes that a step has ended, and with it the start."""
    global _last_step
    if "starting" in _phases:
        _set("compiling", False)
        _set("starting", False)
        heartbeat.first_step_done()
    else:
        _steps.append(time.monotonic() - _last_step)
    _last_step = time.monotonic()
    alive()


def share(store: Store) -> None:
    """From now on, the other ranks know while this one compiles, and this one while they do."""
    global _shared
    _shared = store


def compiling(begins: bool) -> None:
    """Notes that a compilation begins or ends. During one, the limit is `start_seconds`, on all ranks: in a collective
    the others wait for this one."""
    if _shared is not None:
        _shared.add(_COMPILING, 1 if begins else -1)
    _set("compiling", begins)


def _another_compiles() -> bool:
    try:
        return _shared is not None and _shared.add(_COMPILING, 0) > 0
    except Exception:  # the store's rank is gone: whatever PyTorch raises then
        return False


def slow_phase() -> contextlib.AbstractContextManager[None]:
    """Within the block, a save or an evaluation, the limit doesn't follow the time of steps."""
    return _within("slow phase")


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Within the block, nothing counts as a hang: for waits that have a limit of their own."""
    return _within("unwatched")


@contextlib.contextmanager
def _within(phase: str) -> Iterator[None]:
    """Within the block, the rank is in `phase`, whose time isn't that of a step."""
    global _last_step
    before = phase in _phases
    _set(phase, True)
    try:
        yield
    finally:
        _last_step = time.monotonic()
        _set(phase, before)


def _set(phase: str, begins: bool) -> None:
    """Notes that a phase begins or ends, which is progress too."""
    alive()
    (_phases.add if begins else _phases.discard)(phase)
    _changed.set()


@contextlib.contextmanager
def watching(rank: int, hang_seconds: float | None, start_seconds: float, store_seconds: float = 0.0) -> Iterator[None]:
    """Within the block, ends the process with exit code 1 when it makes no progress within the limit.

    The limit is `start_seconds` at first and while the process compiles or loads, else `hang_seconds`. Where that is
    None, it is as long as 20 steps, by the median of the latest, and at least 120 s; `start_seconds` until 20 steps are
    known, and while the process saves or evaluates. While another rank compiles, the limit is `start_seconds`, too.
    `store_seconds`, for which the store of a remote corpus is waited for, are added to the limit.
    """
    faulthandler.enable()  # so that a crash in native code prints its stacks too
    done = threading.Event()
    starting()
    thread = threading.Thread(
        target=_watch, args=(rank, hang_seconds, start_seconds, store_seconds, done), name="watchdog", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        _changed.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def hang_limit(seconds: Sequence[float]) -> float | None:
    """The limit that follows from the `seconds` of the latest steps; None until there are enough of them."""
    return max(LEAST_SECONDS, STEPS * statistics.median(seconds)) if len(seconds) >= STEPS else None


def _limit(hang_seconds: float | None, start_seconds: float) -> tuple[str, float]:
    """The limit in seconds, and the setting that it comes from."""
    if _phases.isdisjoint(("starting", "compiling")):
        if hang_seconds is not None:
            return "faults.hang_timeout_seconds", hang_seconds
        if (usual := hang_limit(_steps)) is not None and "slow phase" not in _phases:
            return f"{STEPS} steps and {LEAST_SECONDS:g} s; faults.hang_timeout_seconds sets another limit", usual
    return "faults.start_timeout_seconds", start_seconds


def _watch(
    rank: int, hang_seconds: float | None, start_seconds: float, store_seconds: float, done: threading.Event
) -> None:
    while True:
        _changed.clear()
        if done.is_set():
            return
        if "unwatched" in _phases:
            faulthandler.cancel_dump_traceback_later()
            _changed.wait()
            continue
        setting, limit = _limit(hang_seconds, start_seconds)
        limit += store_seconds
        left = _last + limit - time.monotonic()
        if left <= 0 and limit < start_seconds and _another_compiles():
            setting, limit = "faults.start_timeout_seconds", start_seconds
            left = _last + limit - time.monotonic()
        if left <= 0:
            break
        # native code that hangs while it holds the GIL stops this thread too; faulthandler's thread needs no GIL
        faulthandler.dump_traceback_later(left + GRACE, exit=True)
        _changed.wait(left)
    message = f"rank {rank}: no progress for {limit:g} s ({setting}); all stacks follow\n"
    os.write(2, message.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    heartbeat.tell(rank, "hung")
    time.sleep(SECONDS_TO_LOOK)
    os._exit(1)
