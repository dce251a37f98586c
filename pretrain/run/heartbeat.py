"""The signs that a rank gives its supervisor: that it is alive, how far it is, and that it fails, hangs or is done.

A supervisor gives its ranks a directory of their node. Each rank maps a file of a few numbers there into its memory,
so that writing one is no system call. A thread beats twice a second. It stops beating when the process is stopped, or
when native code hangs with the interpreter's lock. Where a step hangs for another reason, the rank that others wait
for is behind them. All times are of the machine's monotonic clock.

A message is a file beside the heartbeat. `rank-3.failed` has the error, `rank-3.faulty` the number of a rank whose
arithmetic was found wrong; `rank-3.hung` and `rank-3.done` are empty. A file appears whole, its time says when it
happened, and the first of a kind stays.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from data_pipeline.foundation.errors import UserError

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


class Message(NamedTuple):
    """A message of rank `rank`: `kind` is the file's suffix, `text` its content, `when` its time in ns since 1970."""

    rank: int
    kind: str
    text: str
    when: int


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


def tell(rank: int, kind: Literal["failed", "faulty", "hung", "done"], text: str = "") -> None:
    """Tells the supervisor of this rank, if it has one, by a message.

    A rank hangs because of itself or because it waits for another. The exit code 0 is no failure if a rank is done.
    """
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return
    now, unnamed, named = time.time_ns(), Path(directory, f".{rank}.{kind}"), Path(directory, f"rank-{rank}.{kind}")
    with contextlib.suppress(OSError):
        unnamed.write_text(text)
        os.utime(unnamed, ns=(now, now))  # the kernel's own times are some milliseconds apart
        os.link(unnamed, named)  # not over an earlier one


def tell_failed(rank: int, error: BaseException) -> None:
    """Tells that a rank fails. Others fail because of it, but may end earlier."""
    tell(rank, "failed", _words(error))


def messages(directory: Path, known: set[str]) -> list[Message]:
    """The messages that have appeared in a node's directory, in the order of events. The files' names are added to
    `known`."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in directory.glob("rank-*.*"):
            if file.name not in known:
                known.add(file.name)
                rank, kind = file.name.removeprefix("rank-").split(".")
                found.append(Message(int(rank), kind, file.read_text(), file.stat().st_mtime_ns))
    return sorted(found, key=lambda one: one.when)


def _words(error: BaseException) -> str:
    """An error as the end of its traceback says it, without what follows on further lines; "" for a signal's."""
    if isinstance(error, SystemExit):
        return f"exited with code {error.code or 0} before the run's end"
    if not isinstance(error, Exception):
        return ""
    said = str(error) if isinstance(error, UserError) else traceback.format_exception_only(error)[-1]
    return next(iter(said.splitlines()), "")


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
