"""How a rank tells its supervisor that it fails, hangs or is done: by a file beside its heartbeat.

`rank-3.failed` has the error, `rank-3.faulty` the number of a rank whose arithmetic was found wrong; `rank-3.hung` and
`rank-3.done` are empty. A file appears whole, its time says when it happened, and the first of a kind stays.
`launch.rank_wrapper` adds `rank-3.started` and `rank-3.ended`.
"""

import contextlib
import os
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from data_pipeline.foundation.errors import UserError
from pretrain.run.heartbeat import DIRECTORY


class Outcome(NamedTuple):
    """A message of rank `rank`, or of its wrapper: `kind` is the file's suffix, `text` its content."""

    rank: int
    kind: str
    text: str


def failed(rank: int, error: BaseException) -> None:
    """Tells that a rank fails. Others fail because of it, but may end earlier."""
    _tell(rank, "failed", _words(error))


def hung(rank: int) -> None:
    """Tells that a rank makes no progress, because of itself or because it waits for another."""
    _tell(rank, "hung")


def faulty(rank: int, found_by: int) -> None:
    """Tells that rank `found_by` has found the arithmetic of `rank`, which may be itself, to be wrong."""
    _tell(found_by, "faulty", str(rank))


def done(rank: int) -> None:
    """Tells that a rank has ended its work, so that exit code 0 is no failure."""
    _tell(rank, "done")


def new(directory: Path, known: set[str]) -> list[Outcome]:
    """The messages that have appeared in a node's directory, in the order of events. The files' names are added to
    `known`."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in directory.glob("rank-*.*"):
            if file.name not in known:
                known.add(file.name)
                rank, kind = file.name.removeprefix("rank-").split(".")
                found.append((file.stat().st_mtime_ns, Outcome(int(rank), kind, file.read_text())))
    return [outcome for _, outcome in sorted(found, key=lambda one: (one[0], one[1].kind == "ended"))]


def _words(error: BaseException) -> str:
    """An error as the end of its traceback says it, without what follows on further lines; "" for a signal's."""
    if isinstance(error, SystemExit):
        return f"exited with code {error.code or 0} before the run's end"
    if not isinstance(error, Exception):
        return ""
    said = str(error) if isinstance(error, UserError) else traceback.format_exception_only(error)[-1]
    return next(iter(said.splitlines()), "")


def _tell(rank: int, kind: str, text: str = "") -> None:
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return
    now, unnamed, named = time.time_ns(), Path(directory, f".{rank}.{kind}"), Path(directory, f"rank-{rank}.{kind}")
    with contextlib.suppress(OSError):
        unnamed.write_text(text)
        os.utime(unnamed, ns=(now, now))  # the kernel's own times are some milliseconds apart
        os.link(unnamed, named)  # not over an earlier one
