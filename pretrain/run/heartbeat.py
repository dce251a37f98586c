"""The signs that a rank gives its supervisor while it runs: that it is alive, and how far it is.

A supervisor gives its ranks a directory of their node. Each rank maps a file of a few numbers there into its memory,
so that writing one is no system call. A thread beats twice a second. It stops beating when the process is stopped, or
when native code hangs with the interpreter's lock. Where a step hangs for another reason, the rank that others wait
for is behind them. All times are of the machine's monotonic clock.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.signals import stop_signals

DIRECTORY = "PRETRAIN_HEARTBEATS"  # of this node's ranks, in their environment
_SECONDS = 0.5


class _File(ctypes.Structure):
    """The content of a rank's file: as `Heartbeat`, but with the times of its signs; 0 if there was no first step."""

    process: int
    step: int
    marks: int
    beat: float
    marked: float
    first_step: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("process", "step", "marks")),
        *((name, ctypes.c_double) for name in ("beat", "marked", "first_step")),
    )


_own: _File | None = None  # mapped


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last signs, in seconds before it was read: its last beat and its last mark.

    `step` is the one that it takes or took, 0 before the first of this attempt. `marks` counts the points of its work
    that it has passed, which are the same on all ranks. `first_step`: seconds since its first step ended; None before.
    `stopped`: true if the process was stopped, as SIGSTOP does.
    """

    step: int
    marks: int
    silent: float
    marked: float
    first_step: float | None
    stopped: bool = False


def mark(step: int | None = None) -> None:
    """Notes that this rank has passed another point of its work; `step`: it begins this step."""
    if _own is None:
        return
    if step is not None:
        _own.step = step
    _own.marks += 1
    _own.marked = time.monotonic()


def first_step_done() -> None:
    if _own is not None:
        _own.first_step = time.monotonic()


@contextlib.contextmanager
def beating(rank: int) -> Iterator[None]:
    """Within the block, this rank shows its supervisor that it is alive, if it has one."""
    global _own
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        yield
        return
    done = threading.Event()
    _own = _opened(Path(directory), rank)
    thread = threading.Thread(target=_beat, args=(_own, done), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _own = None


def read(directory: Path) -> dict[int, Heartbeat]:
    """The heartbeats of a node's ranks, by rank."""
    found = {}
    now = time.monotonic()
    for path in directory.glob("rank-*"):
        if not path.suffix:
            file = _File.from_buffer_copy(path.read_bytes())
            first_step = now - file.first_step if file.first_step else None
            signs = (file.step, file.marks, now - file.beat, now - file.marked, first_step, _is_stopped(file.process))
            found[int(path.name.removeprefix("rank-"))] = Heartbeat(*signs)
    return found


def pending(process: int) -> signal.Signals | None:
    """A stop signal that was sent to `process` but is blocked there; see ShdPnd in proc_pid_status(5)."""
    with contextlib.suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                pending = int(line.split()[1], 16)
                return next((number for number in stop_signals() if pending >> (number - 1) & 1), None)
    return None


def _opened(directory: Path, rank: int) -> _File:
    now = time.monotonic()
    unnamed = directory / f".{rank}"
    unnamed.write_bytes(bytes(_File(os.getpid(), beat=now, marked=now)))
    path = unnamed.rename(directory / f"rank-{rank}")
    with path.open("r+b") as file:
        return _File.from_buffer(mmap.mmap(file.fileno(), 0))


def _beat(own: _File, done: threading.Event) -> None:
    while not done.wait(_SECONDS):
        own.beat = time.monotonic()


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
