"""Finds and records runs that have died: their end isn't recorded, because they were killed together with their
supervisor, or their machine went down."""

import contextlib
import time
from pathlib import Path

from pretrain.run import metrics_file, restarts, status
from pretrain.run.restarts import AttemptRecord
from pretrain.run.status import Status

CAUSE = "the run died: it was killed, or its machine went down"
_SECONDS_TO_RECORD = 60.0  # within which a living supervisor records the end of an attempt, or starts another


def death(run: Path) -> Status | None:
    """The death of the run in a directory where no process trains; None if the end of the run is recorded."""
    now, path = status.read(run), run / status.STATUS
    if now.state != "running" or any(one.attempt == now.attempt for one in restarts.read(run)):
        return None
    last = metrics_file.last_row(run / metrics_file.FILE_NAME)
    if last is None or last.attempt != now.attempt:
        return Status("died", now.attempt, None, ended=path.stat().st_mtime)
    return Status("died", now.attempt, last.step, ended=last.time)


def state(run: Path) -> Status:
    """The state of a run. "died" if no process trains there and the end of the run isn't recorded within a minute."""
    found = None if status.in_use(run) else death(run)
    return found if found and time.time() - (found.ended or 0.0) > _SECONDS_TO_RECORD else status.read(run)


def record(run: Path, checkpoint: int) -> Status | None:
    """Records that the run in `run` has died; None if it hasn't. Called before the next start there, and before the run
    is renamed.

    `checkpoint`: the newest step that the run could resume from.
    """
    if (found := death(run)) is None:
        return None
    died = AttemptRecord(
        found.attempt,
        "failed",
        began=(run / status.STATUS).stat().st_mtime,
        ended=found.ended or 0.0,
        step=found.step,
        cause=CAUSE,
        killed=True,
        checkpoint=checkpoint,
    )
    with contextlib.suppress(OSError):  # a full disk is reported by others
        status.write(run, found)
        restarts.add(run, died)
    return found


def in_words(found: Status) -> str:
    """A death in words: "died on 2026-11-27 12:03 after step 25: …"."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.ended))
    where = f"after step {found.step:,}" if found.step else "before its first line of metrics"
    return f"died on {when} {where}: it was killed, or its machine went down"
