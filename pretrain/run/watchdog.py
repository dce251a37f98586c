"""Ends a rank that hangs, and prints the stacks of all its threads to stderr.

Code that makes progress calls `alive()`: a step, a validation batch, a phase of a save. The limit follows the time that
steps take, and is longer while a rank starts, compiles, loads, saves or evaluates. Twice a second, a thread checks
whether there was progress, and writes the heartbeat for the supervisor. At points that all ranks pass, they call
`mark()`, so that the supervisor sees which rank is behind.
"""

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from pretrain.run import heartbeat


class Store(Protocol):
    """A counter that all ranks see: `torch.distributed.TCPStore`."""

    def add(self, key: str, amount: int, /) -> int: ...


SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_LOOK = 0.3  # for the supervisor to read the marks of the ranks before this rank ends
GRACE = 20.0  # seconds after which faulthandler reports a hang if the Python thread hasn't
LEAST_SECONDS, STEPS = 120.0, 20  # a hang takes at least 120 s, and as long as 20 steps
_COMPILING = "watchdog/compiling"


class _Rank:
    """The progress of this process. Times are of the machine's monotonic clock."""

    def __init__(self) -> None:
        self.signs = heartbeat.Signs()
        self.last = time.monotonic()  # its last progress
        self.last_step = self.last
        self.steps: deque[float] = deque(maxlen=5 * STEPS)  # seconds of the latest steps, without first steps
        self.phases = {"starting"}  # its phases: "starting", "compiling", "slow phase", "unwatched"
        self.store: Store | None = None  # where the ranks count how many of them compile


_rank = _Rank()  # a process is one rank


def alive() -> None:
    """Notes that the rank has just made progress."""
    _rank.last = time.monotonic()


def mark(step: int | None = None) -> None:
    """Notes that this rank has passed another point of its work. `step`: the step that begins here."""
    if step is not None:
        _rank.signs.step = step
    _rank.signs.marks += 1


def starting() -> None:
    """From now to the end of the next step, the limit is `start_seconds`. For starts, and before a checkpoint is
    verified or loaded."""
    _set("compiling", False)
    _set("starting", True)


def step_done() -> None:
    """Notes that a step has ended. The first one ends the start."""
    alive()
    if "starting" in _rank.phases:
        _rank.phases -= {"starting", "compiling"}
        _rank.signs.first_step = _rank.last
    else:
        _rank.steps.append(_rank.last - _rank.last_step)
    _rank.last_step = _rank.last


def share(store: Store) -> None:
    """From now on, ranks tell each other through `store` while they compile."""
    _rank.store = store


def compiling(begins: bool) -> None:
    """Notes that a compilation begins or ends. Meanwhile the limit is `start_seconds` on all ranks, since the others
    wait for this rank in collectives."""
    if _rank.store is not None:
        _rank.store.add(_COMPILING, 1 if begins else -1)
    _set("compiling", begins)


def _another_compiles() -> bool:
    try:
        return _rank.store is not None and _rank.store.add(_COMPILING, 0) > 0
    except Exception:  # whatever PyTorch raises if the store's rank is gone
        return False


def slow_phase() -> contextlib.AbstractContextManager[None]:
    """Within the block, a save or an evaluation, the limit doesn't follow the time of steps."""
    return _within("slow phase")


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Within the block, nothing counts as a hang. For waits that have a limit of their own."""
    return _within("unwatched")


@contextlib.contextmanager
def _within(phase: str) -> Iterator[None]:
    """Within the block, the rank is in `phase`, whose time doesn't count as the time of a step."""
    before = phase in _rank.phases
    _set(phase, True)
    try:
        yield
    finally:
        _set(phase, before)
        _rank.last_step = _rank.last


def _set(phase: str, begins: bool) -> None:
    """Notes that a phase begins or ends. This is progress, too."""
    alive()
    (_rank.phases.add if begins else _rank.phases.discard)(phase)


@contextlib.contextmanager
def watching(rank: int, hang_seconds: float | None, start_seconds: float, store_seconds: float = 0.0) -> Iterator[None]:
    """Within the block, writes heartbeats for the supervisor of `rank`, if there is one, and ends the process with exit
    code 1 if it makes no progress within the limit.

    The limit is `start_seconds` at the start, and while this process compiles or loads, or another rank compiles.
    Otherwise it is `hang_seconds`. If `hang_seconds` is None, the limit is 20 times the median of the latest steps, and
    at least 120 s; it is `start_seconds` until 20 steps are known, and while the process saves or evaluates.
    `store_seconds`, the longest wait for the store of a remote corpus, are added to the limit.
    """
    faulthandler.enable()  # a crash in native code then prints its stacks, too
    _rank.signs = heartbeat.shown(rank)
    starting()
    done = threading.Event()
    look = partial(_look, rank, hang_seconds, start_seconds, store_seconds)

    def watch(seconds: float) -> None:
        while not done.wait(seconds):
            seconds = look()

    thread = threading.Thread(target=watch, args=(look(),), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        _rank.signs = heartbeat.Signs()


def hang_limit(seconds: Sequence[float]) -> float | None:
    """The limit by the `seconds` of the latest steps; None if there are too few of them."""
    return max(LEAST_SECONDS, STEPS * statistics.median(seconds)) if len(seconds) >= STEPS else None


def _limit(hang_seconds: float | None, start_seconds: float) -> tuple[str, float]:
    """The setting that has the limit, and the limit in seconds."""
    if _rank.phases.isdisjoint(("starting", "compiling")):
        if hang_seconds is not None:
            return "faults.hang_timeout_seconds", hang_seconds
        if (usual := hang_limit(_rank.steps)) is not None and "slow phase" not in _rank.phases:
            return f"{STEPS} steps and {LEAST_SECONDS:g} s; faults.hang_timeout_seconds sets another limit", usual
    return "faults.start_timeout_seconds", start_seconds


def _look(rank: int, hang_seconds: float | None, start_seconds: float, store_seconds: float) -> float:
    """Writes a heartbeat, and ends the process if it hangs. Returns the seconds to the next call, which is no later
    than the limit: the supervisor blames the rank that hangs first."""
    _rank.signs.beat = now = time.monotonic()
    if "unwatched" in _rank.phases:
        faulthandler.cancel_dump_traceback_later()
        return SECONDS_BETWEEN_LOOKS
    setting, limit = _limit(hang_seconds, start_seconds)
    limit += store_seconds
    if now > _rank.last + limit and limit < start_seconds and _another_compiles():
        setting, limit = "faults.start_timeout_seconds", start_seconds
    left = _rank.last + limit - now
    if left > 0:
        # native code that hangs with the GIL stops this thread, too; faulthandler's thread needs no GIL
        faulthandler.dump_traceback_later(left + GRACE, exit=True)
        return min(left, SECONDS_BETWEEN_LOOKS)
    message = f"rank {rank}: no progress for {limit:g} s ({setting}); all stacks follow\n"
    os.write(2, message.encode())
    faulthandler.dump_traceback(2, all_threads=True)
    heartbeat.tell(rank, "hung")
    time.sleep(SECONDS_TO_LOOK)
    os._exit(1)
