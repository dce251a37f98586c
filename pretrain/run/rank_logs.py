"""The logs of ranks, such as RUN/logs/attempt-0001/rank-00000.log: all output of a rank under a supervisor, including
the output of a crash."""

import itertools
import os
import re
import tempfile
from collections import deque
from pathlib import Path

from data_pipeline.base.errors import UserError
from pretrain.run import metrics_file, status

SUPERVISED = "PRETRAIN_SUPERVISED"  # variable of supervised ranks: the directory of this attempt's logs
_LOGS, _ATTEMPT = "logs", "attempt-"
_DIRECTORY = re.compile(rf"{_ATTEMPT}(\d{{4,9}})")
_LAST_LINES = 40  # a stack dump ends with the main thread, its innermost call on top
_BLOCK = 4096  # bytes: a smaller file may still fit on a full disk


def next_attempt(run: Path) -> int:
    """The number of the next start, from 1. Starts that failed before they trained count too."""
    logged = (int(name[1]) for path in (run / _LOGS).glob("*") if (name := _DIRECTORY.fullmatch(path.name)))
    last = metrics_file.last_row(run / metrics_file.FILE_NAME)
    return 1 + max(status.read(run).attempt, last.attempt if last else 0, *logged)


def new_directory(run: Path) -> Path:
    """Creates the directory for a new attempt's logs."""
    for number in itertools.count(next_attempt(run)):
        directory = run / _LOGS / f"{_ATTEMPT}{number:04d}"
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:  # made by another start, which a network file system didn't show yet
            continue
        except OSError as error:
            raise UserError(f"run.directory: {run} can't be created: {error.strerror}") from None
    raise AssertionError


def attempt(directory: Path) -> int:
    return int(directory.name.removeprefix(_ATTEMPT))


def supervised() -> Path | None:
    """The directory of this attempt's logs; None without a supervisor."""
    directory = os.environ.get(SUPERVISED)
    return Path(directory) if directory else None


def rank_log(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.log"


def refusal(directory: Path) -> str | None:
    """Why `directory` can't be written to, for instance because the disk is full; None if it can be written to."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def last_lines(log: Path) -> list[str]:
    """The last lines of a log; none if it can't be read."""
    try:
        with log.open(errors="replace") as lines:
            return list(deque((line.rstrip("\n") for line in lines), _LAST_LINES))
    except OSError:
        return []
