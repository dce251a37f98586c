"""The state of a run in files: RUN/status.json; RUN/stop, a request to stop, which rank 0 looks for in each step; and
RUN/lock.

Rank 0 locks RUN/lock, so that no second run trains in the same directory. The kernel releases the lock when the process
ends, however it ends. If its machine is lost, a server of NFS 4 releases the lock after its lease, 90 s by default. The
content of the file then means nothing.
"""

import contextlib
import itertools
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO, cast

from pydantic import NonNegativeInt

from data_pipeline.base.atomic import lock as lock_file
from data_pipeline.base.atomic import write_json
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.base.processes import until

STATUS = "status.json"
STOP = "stop"
LOCK = "lock"
CLEARED = "PRETRAIN_STOP_CLEARED"  # variable of ranks whose launcher has removed an old RUN/stop
_SECONDS_TO_LOCK = 1.0  # `check_lock` and `in_use` hold the lock for a moment
_SECONDS_TO_LOCK_AGAIN = 180.0  # twice the lease of an NFS 4 server, which keeps the lock of a lost machine


@dataclass(frozen=True)
class Status:
    """The state of a run.

    Attributes:
        attempt: the number of the start, from 1.
        step: the number of steps done when the run ended.
        stop_file: True if RUN/stop existed when the run ended.
        reason: why no attempt follows a failed one.
        state: only a supervisor writes "failed". The next start writes "died" for a run whose end isn't recorded.
        ended: for "died", the time of its last metrics, in seconds since 1970. `step` is then also theirs.
    """

    state: Literal["new", "running", "stopped", "finished", "failed", "died"] = "new"
    attempt: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    stop_file: bool = False
    reason: str = ""
    ended: float | None = None


def read(run: Path) -> Status:
    """The status of `run`; "new" if the file is missing or damaged."""
    return read_valid_json(run / STATUS, Status) or Status()


def write(run: Path, status: Status) -> None:
    write_json(run / STATUS, asdict(status))


def move_aside(run: Path) -> None:
    """Renames `run`, if it exists, to make way for a new run. Raises UserError if it can't be renamed."""
    if not run.exists():
        return
    if Path.cwd().is_relative_to(run.resolve()):  # relative paths would then lead into the old run
        raise UserError(f"run.directory: {run}: --fresh can't rename the current folder; start from another one")
    names = (run.with_name(f"{run.name}.old-{number}") for number in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    try:
        run.rename(aside)
    except OSError as error:
        raise UserError(f"run.directory: {run} can't be moved to {aside}: {error.strerror}") from None
    print(f"{run}: moved the existing run to {aside}", flush=True)


def request_stop(run: Path) -> None:
    """Asks the ranks of `run` to save and exit after their current step."""
    run.mkdir(parents=True, exist_ok=True)
    (run / STOP).touch()


def stop_requested(run: Path) -> bool:
    """False also if a network disk doesn't answer: the request is seen the next time."""
    return os.path.exists(run / STOP)  # noqa: PTH110 - Path.exists would raise an OSError then


def clear_stop(run: Path) -> None:
    (run / STOP).unlink(missing_ok=True)


def lock(run: Path, restart: bool = False) -> TextIO:
    """Locks `run` as long as the returned file is open. Raises UserError naming the process that holds the lock.

    `restart`: the lock of an earlier rank 0, whose machine may be lost, is waited for.
    """
    file = _opened(run, "a+")
    unprotected = f"{run}: nothing prevents a second run in this directory; make sure that only one trains there"
    if not _locked(file, _SECONDS_TO_LOCK_AGAIN if restart else _SECONDS_TO_LOCK, unprotected):
        raise _refusal(run, file)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def check_lock(run: Path, restart: bool = False) -> None:
    """Raises UserError if a process trains in `run`. `restart` as in `lock`."""
    if not (run / LOCK).exists():
        return
    with _opened(run, "r") as file:
        seconds = _SECONDS_TO_LOCK_AGAIN if restart else 0.0
        if not _locked(file, seconds, None, shared=True):  # `lock` warns if the file system has no locks
            raise _refusal(run, file)


def in_use(run: Path) -> bool:
    """True if a process trains in `run`, or if the file system has no locks, so that nobody knows."""
    if not (run / LOCK).exists():
        return False
    with _opened(run, "r") as file:
        try:
            return not lock_file(file, None, shared=True)
        except BlockingIOError:
            return True


def _opened(run: Path, mode: str) -> TextIO:
    try:
        return cast(TextIO, (run / LOCK).open(mode))
    except OSError as error:
        raise UserError(f"run.directory: {run / LOCK} can't be opened: {error.strerror}") from None


def _locked(file: TextIO, seconds: float, unprotected: str | None, shared: bool = False) -> bool:
    """Tries to lock `file` for so many `seconds`; returns whether no other process holds the lock. `unprotected` as in
    `lock_file`."""

    def locked() -> bool:
        with contextlib.suppress(BlockingIOError):
            lock_file(file, unprotected, shared=shared)
            return True
        return False

    return until(locked, seconds)


def _refusal(run: Path, file: TextIO) -> UserError:
    file.seek(0)
    holder = file.read().strip() or "another process"
    return UserError(f"run.directory: {run}: {holder} is already training here")
