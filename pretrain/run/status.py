"""RUN/status.json, the state of the run. RUN/stop, a request to stop, which rank 0 looks for in each step. RUN/lock.

Rank 0 locks RUN/lock, so that no second run works in the same directory. The kernel releases the lock when the process
ends, however it ends; the content of the file means nothing after that.
"""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO, cast

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import lock as lock_file
from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.json_file import read_valid_json

STATUS = "status.json"
STOP = "stop"
LOCK = "lock"


@dataclass(frozen=True)
class Status:
    """The state of a run.

    Attributes:
        attempt: the number of its starts, from 1.
        step: the number of steps done when it ended.
        stop_file: True if RUN/stop existed when the run ended.
        reason: why no attempt follows a failed one.
        state: only a supervisor writes "failed". The next start writes "died" for a run whose end nobody recorded;
            `step` and `ended` (in seconds since 1970) are then those of its last metrics.
    """

    state: Literal["new", "running", "stopped", "finished", "failed", "died"] = "new"
    attempt: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    stop_file: bool = False
    reason: str = ""
    ended: float | None = None


def read(run: Path) -> Status:
    """The status of `run`; that of a new run if the file is missing or damaged."""
    return read_valid_json(run / STATUS, Status) or Status()


def write(run: Path, status: Status) -> None:
    write_json(run / STATUS, asdict(status))


def move_aside(run: Path) -> None:
    """Renames `run`, if it is there, to make way for a new run. Raises UserError if it can't be renamed."""
    if not run.exists():
        return
    number = 1
    while (aside := run.with_name(f"{run.name}.old-{number}")).exists():
        number += 1
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
    return (run / STOP).exists()


def clear_stop(run: Path) -> None:
    (run / STOP).unlink(missing_ok=True)


def lock(run: Path) -> TextIO:
    """Locks `run` as long as the returned file is open. Raises UserError naming the process that holds the lock."""
    file = _opened(run, "a+")
    try:
        lock_file(file, f"{run}: nothing prevents a second run in this directory; make sure that only one trains there")
    except BlockingIOError:
        raise _refusal(run, file) from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def check_lock(run: Path) -> None:
    """Raises UserError if a process trains in `run`."""
    if (run / LOCK).exists():
        with _opened(run, "r") as file:
            try:
                lock_file(file, None, shared=True)  # `lock` warns where there are no locks
            except BlockingIOError:
                raise _refusal(run, file) from None


def in_use(run: Path) -> bool:
    """Whether a process trains in `run`. True as well where the file system has no locks, and nobody knows."""
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


def _refusal(run: Path, file: TextIO) -> UserError:
    file.seek(0)
    holder = file.read().strip() or "another process"
    return UserError(f"run.directory: {run}: {holder} is already training here")
