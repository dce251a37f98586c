"""The signs that a rank gives its supervisor while it runs: that it is alive, and how far it is.

A supervisor gives its ranks a directory of their node. Each rank maps a file of a few numbers there into its memory,
so that writing one is no system call. A thread beats twice a second. It stops beating when the process is stopped, or
when native code hangs with the interpreter's lock. Where a step hangs for another reason, the rank that others wait
for is behind them. All times are of the machine's monotonic clock.
"""

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = "PRETRAIN_HEARTBEATS"  # of this node's ranks, in their environment
_SECONDS = 0.5
_FORMAT = "<qqqddd"  # process, step, marks, and the times of the last beat, the last mark and the first step's end
_FIELDS = {"step": 8, "marks": 16, "beat": 24, "marked": 32, "first_step": 40}  # offsets
_SIZE = struct.calcsize(_FORMAT)
_own: mmap.mmap | None = None
_marks = 0


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
    global _marks
    if _own is None:
        return
    _marks += 1
    if step is not None:
        struct.pack_into("<q", _own, _FIELDS["step"], step)
    struct.pack_into("<q", _own, _FIELDS["marks"], _marks)
    struct.pack_into("<d", _own, _FIELDS["marked"], time.monotonic())


def first_step_done() -> None:
    if _own is not None:
        struct.pack_into("<d", _own, _FIELDS["first_step"], time.monotonic())


@contextlib.contextmanager
def beating(rank: int) -> Iterator[None]:
    """Within the block, this rank shows its supervisor that it is alive, if it has one."""
    global _own, _marks
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        yield
        return
    done = threading.Event()
    _own, _marks = _opened(Path(directory), rank), 0
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
        if not path.suffix and len(values := path.read_bytes()) == _SIZE:
            process, step, marks, beat, marked, first = struct.unpack(_FORMAT, values)
            since_first = now - first if first else None
            heartbeat = Heartbeat(step, marks, now - beat, now - marked, since_first, _is_stopped(process))
            found[int(path.name.removeprefix("rank-"))] = heartbeat
    return found


def _opened(directory: Path, rank: int) -> mmap.mmap:
    now = time.monotonic()
    unnamed = directory / f".{rank}"
    unnamed.write_bytes(struct.pack(_FORMAT, os.getpid(), 0, 0, now, now, 0.0))
    path = unnamed.rename(directory / f"rank-{rank}")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE)


def _beat(own: mmap.mmap, done: threading.Event) -> None:
    while not done.wait(_SECONDS):
        struct.pack_into("<d", own, _FIELDS["beat"], time.monotonic())


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
