"""Sends heartbeats and messages from a rank to its supervisor: that it is alive, how far it is, and that it fails,
hangs or is done.

A supervisor gives its ranks a directory on their node. Each rank maps a file of a few numbers there into memory, so
that a heartbeat is no system call. `watchdog.py` writes a heartbeat twice a second. Heartbeats stop if the process is
stopped, or if native code hangs while it holds the GIL. If a step hangs for another reason, the rank that the others
wait for has the fewest marks. All times are of the machine's monotonic clock.

Messages are files next to the heartbeat, written atomically. The first message of a kind wins, and its mtime is the
time of the event. `rank-3.failed` has the error. `rank-3.faulty` has the number of a rank whose arithmetic was wrong.
`rank-3.hung` and `rank-3.done` are empty.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from data_pipeline.base.errors import UserError

DIRECTORY = "PRETRAIN_HEARTBEATS"  # variable of ranks: the directory on their node
_MEMORY = "/dev/shm"


class Signs(ctypes.Structure):
    """The content of a rank's file: as `Heartbeat`, with times in place of seconds since then. 0: no first step yet."""

    process: int
    step: int
    marks: int
    beat: float
    first_step: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("process", "step", "marks")),
        *((name, ctypes.c_double) for name in ("beat", "first_step")),
    )


def new_directory() -> Path:
    """A new directory of this user alone. It is in memory, if there is such a file system: heartbeats need no disk."""
    return Path(tempfile.mkdtemp(prefix="encdec-pretrain-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))


@dataclass(frozen=True)
class Heartbeat:
    """A rank's heartbeat, as it was when it was read.

    Attributes:
        step: the step that the rank takes or took last; 0 before the first step of this attempt.
        marks: the number of points in its work that the rank has passed; all ranks pass the same points.
        silent: seconds since the last beat.
        first_step: seconds since its first step ended; None before.
        stopped: True if the process is stopped, as SIGSTOP does.
    """

    step: int
    marks: int
    silent: float
    first_step: float | None
    stopped: bool = False


class Message(NamedTuple):
    """A message of a rank. `kind`: the suffix of the file. `text`: its content. `when`: its time in ns since 1970."""

    rank: int
    kind: str
    text: str
    when: int


def shown(rank: int) -> Signs:
    """The signs of this rank, in a file that its supervisor reads; without a supervisor, in memory."""
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return Signs()
    unnamed = Path(directory, f".{rank}")
    unnamed.write_bytes(bytes(Signs(os.getpid(), beat=time.monotonic())))
    path = unnamed.rename(Path(directory, f"rank-{rank}"))
    with path.open("r+b") as file:
        return Signs.from_buffer(mmap.mmap(file.fileno(), 0))


def read(directory: Path) -> dict[int, Heartbeat]:
    """The heartbeats of a node's ranks, by rank."""
    found = {}
    now = time.monotonic()
    with contextlib.suppress(FileNotFoundError):  # something has removed the directory
        for path in directory.glob("rank-*"):
            if not path.suffix:
                signs = Signs.from_buffer_copy(path.read_bytes())
                found[int(path.name.removeprefix("rank-"))] = Heartbeat(
                    signs.step,
                    signs.marks,
                    silent=now - signs.beat,
                    first_step=now - signs.first_step if signs.first_step else None,
                    stopped=is_stopped(signs.process),
                )
    return found


def tell(rank: int, kind: Literal["failed", "faulty", "hung", "done"], text: str = "") -> None:
    """Sends a message to the supervisor of this rank, if it has one.

    "hung" doesn't say that the rank is the cause: it may wait for another rank. If a rank is "done", its exit code 0 is
    no failure.
    """
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return
    now = time.time_ns()
    unnamed = Path(directory, f".{rank}.{kind}")
    with contextlib.suppress(OSError):
        # whatever the locale: an error may name a file with other letters, or with bytes that are no text
        unnamed.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.utime(unnamed, ns=(now, now))  # the kernel's own times are some milliseconds apart
        os.link(unnamed, Path(directory, f"rank-{rank}.{kind}"))  # an earlier message stays


def tell_failed(rank: int, error: BaseException) -> None:
    """Tells the supervisor that this rank fails. Ranks that fail because of this one may end earlier."""
    text = ""  # for a signal
    if isinstance(error, SystemExit):
        text = f"exited with code {error.code or 0} before the run's end"
    elif isinstance(error, Exception):  # as the end of its traceback, without further lines
        message = str(error) if isinstance(error, UserError) else traceback.format_exception_only(error)[-1]
        text = next(iter(message.splitlines()), "")
    tell(rank, "failed", text)


def messages(directory: Path, known: set[str]) -> list[Message]:
    """The new messages in a node's directory, in the order of events. `known`: names of known files, to which the new
    names are added."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in directory.glob("rank-*.*"):
            if file.name not in known:
                known.add(file.name)
                rank, kind = file.name.removeprefix("rank-").split(".")
                text = file.read_text(encoding="utf-8", errors="replace")
                found.append(Message(int(rank), kind, text, file.stat().st_mtime_ns))
    return sorted(found, key=lambda one: one.when)


def is_stopped(process: int) -> bool:
    """True if a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
