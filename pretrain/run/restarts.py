"""The records of a run's attempts in RUN/attempts.jsonl: whether another attempt follows a failed one, and which runs
have died, killed together with their supervisor or with their machine.
"""

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from data_pipeline.base.errors import FailedError
from data_pipeline.base.json_file import parse_json
from pretrain.run import metrics_file, status
from pretrain.run.status import Status

FILE_NAME = "attempts.jsonl"
EARLIER = "PRETRAIN_EARLIER_SECONDS"  # variable of ranks: seconds that earlier attempts of their supervisor took
_WINDOW = 3600.0  # s: `faults.max_restarts` counts the restarts of the last hour
_SAME = 3  # failures of one step with one error: the step won't succeed
_LONGEST_WAIT = 60.0  # s
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, ports and times differ from failure to failure
CAUSE = "the run died: it was killed, or its machine went down"
_SECONDS_TO_RECORD = 60.0  # within which a living supervisor records the end of an attempt, or starts another


@dataclass(frozen=True)
class AttemptRecord:
    """The outcome of an attempt. Times are in seconds since 1970.

    Attributes:
        step: the last step that the attempt began; None: it began none.
        trained_from: when its first step ended.
        rank: the rank that failed first.
        cause: why this rank failed.
        error: the last line that this rank wrote.
        killed: True if something outside the run ended the attempt, such as a signal or a lost node.
        checkpoint: the newest step that the run could resume from when the attempt ended.
        faulty_node: the node of `rank`, if its arithmetic was wrong.
    """

    attempt: PositiveInt
    outcome: Literal["finished", "stopped", "failed", "refused"]
    began: float
    ended: float
    trained_from: float | None = None
    step: NonNegativeInt | None = None
    rank: NonNegativeInt | None = None
    cause: str = ""
    error: str = ""
    killed: bool = False
    checkpoint: NonNegativeInt = 0
    faulty_node: str = ""

    def same_failure(self, other: "AttemptRecord") -> bool:
        """True if both failed with the same error at the same step, or before any step."""
        return (self.step, self._kind) == (other.step, other._kind)

    @property
    def _kind(self) -> str:
        return _NUMBERS.sub("#", self.cause if self.killed else self.error or self.cause)


def refusal(failures: Sequence[AttemptRecord], most: int) -> str | None:
    """Why no attempt follows the last of this supervisor's `failures`, and what to do; None if an attempt follows.

    `most`: `faults.max_restarts`, the maximum number of restarts within an hour.
    """
    last = failures[-1]
    if last.outcome == "refused" or most == 0:
        return ""
    if _DISK_FULL.search(last.error):
        return f"the disk refuses to be written ({last.error}); free some space, then run the same command again"
    where, same = f"step {last.step}" if last.step else "the start", f"with the same error ({last.error or last.cause})"
    before = list(failures[-_SAME:-1])
    by_chance = last.killed and not last.step  # a signal that comes at any time hits a start now and then
    if len(before) == _SAME - 1 and all(one.same_failure(last) for one in before) and not by_chance:
        return f"{where} has failed {_SAME} times {same}, so another attempt would fail too"
    if before and not last.killed and last.same_failure(before[-1]) and last.checkpoint <= before[-1].checkpoint:
        return f"{where} has failed twice {same} and no new checkpoint between, so it would fail again"
    if not left(failures[:-1], most, last.ended):
        return f"{most} restarts within an hour are the limit (faults.max_restarts); the same command resumes the run"
    return None


def faulty_again(failures: Sequence[AttemptRecord]) -> str | None:
    """The node whose arithmetic was wrong in the last of `failures` and in an earlier one; None if there is none."""
    node = failures[-1].faulty_node
    return node if node and any(one.faulty_node == node for one in failures[:-1]) else None


def left(failures: Sequence[AttemptRecord], most: int, now: float) -> int:
    """The number of restarts that are left at the time `now`, of `most` within an hour."""
    return max(0, most - sum(one.ended > now - _WINDOW for one in failures))


def seconds_to_wait(failures: Sequence[AttemptRecord]) -> float:
    """Seconds to wait before the next attempt: 0 after an attempt that has trained, then 1, 2, 4 … 60."""
    untrained = itertools.takewhile(lambda failure: failure.trained_from is None, reversed(failures))
    idle = len(list(untrained))
    return min(2.0 ** (idle - 1), _LONGEST_WAIT) if idle else 0.0


def is_restart() -> bool:
    """Whether the supervisor of this rank has made earlier attempts, whose ranks have ended or are on a lost node."""
    return EARLIER in os.environ


def earlier_seconds() -> float:
    """Seconds that earlier attempts of this rank's supervisor took."""
    return float(os.environ.get(EARLIER, "0"))


def add(run: Path, record: AttemptRecord) -> None:
    """Appends the record of an attempt to the file of `run`. Raises OSError if the disk refuses."""
    with (run / FILE_NAME).open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(run: Path) -> list[AttemptRecord]:
    """The records of the attempts of `run` that have ended, oldest first. Damaged lines are left out."""
    try:
        lines = (run / FILE_NAME).read_text(errors="replace").splitlines()
    except OSError:  # not there, or a folder in its place
        return []
    found = []
    for line in lines:
        with contextlib.suppress(FailedError):
            found.append(parse_json(line.encode(), AttemptRecord, run / FILE_NAME))
    return found


def death(run: Path) -> Status | None:
    """The death of the run in a directory where no process trains; None if the end of the run is recorded."""
    now, path = status.read(run), run / status.STATUS
    if now.state != "running" or any(one.attempt == now.attempt for one in read(run)):
        return None
    last = metrics_file.last_row(run / metrics_file.FILE_NAME)
    if last is None or last.attempt != now.attempt:
        return Status("died", now.attempt, None, ended=path.stat().st_mtime)
    return Status("died", now.attempt, last.step, ended=last.time)


def state(run: Path) -> Status:
    """The state of a run. "died" if no process trains there and the end of the run isn't recorded within a minute."""
    found = None if status.in_use(run) else death(run)
    return found if found and time.time() - (found.ended or 0.0) > _SECONDS_TO_RECORD else status.read(run)


def record_death(run: Path, checkpoint: int) -> Status | None:
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
        add(run, died)
    return found


def in_words(found: Status) -> str:
    """A death in words: "died on 2026-11-27 12:03 after step 25: …"."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.ended))
    where = f"after step {found.step:,}" if found.step else "before its first line of metrics"
    return f"died on {when} {where}: it was killed, or its machine went down"
