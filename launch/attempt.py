"""Finds out how an attempt of a run went, and which rank made it fail."""

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.base.command import STOPPED
from data_pipeline.base.formatting import counted
from launch.protocol import Event
from pretrain.engine.checkpoint.directory import all_steps
from pretrain.run import rank_logs
from pretrain.run.heartbeat import Heartbeat
from pretrain.run.restarts import AttemptRecord

REFUSED = 2
NO_RANK_FAILED = "no rank reported an error, but the run did not finish"
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|\bgloo\b|ncclRemoteError|NCCL communicator was aborted"
)
_ERROR = re.compile(r"error: \S|([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception)(:|$)")  # ours, or Python's
_SECONDS_FOR_THE_CAUSE = 0.3  # between the first failure and the verdict: the faulty rank may report after its victims
_SILENT = 3.0  # s that a rank must be silent beyond the other ranks


@dataclass
class Attempt:
    """How one attempt went. Times are in seconds since 1970.

    Attributes:
        nodes: the name of each rank's node.
        reported: the events of the nodes, in the order of arrival.
        lost: why nodes no longer answer, by name.
        heartbeats: the last heartbeats of all ranks.
        began: when the attempt began.
        ended: when the attempt ended, or first failed.
        read: when the heartbeats were read.
        shown: the bytes of rank 0's log that the terminal has shown.
    """

    logs: Path
    nodes: Sequence[str] = ()
    reported: list[Event] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    heartbeats: dict[int, Heartbeat] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    read: float = 0.0
    shown: int = 0

    def events(self, *kinds: str) -> dict[int, Event]:
        """Each rank's first event of these kinds, in the order of arrival."""
        found: dict[int, Event] = {}
        for event in self.reported:
            if event.kind in kinds:
                found.setdefault(event.number, event)
        return found

    @property
    def codes(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended."""
        return {rank: event.code for rank, event in self.events("ended").items()}

    @property
    def gone(self) -> dict[int, Event]:
        """The ranks that exited before their work was done."""
        return self.events("left")

    @property
    def failed(self) -> list[int]:
        """The ranks that reported an error before they exited, or exited before their work was done."""
        return list(self.events("failed", "hung", "left"))

    @property
    def faulty(self) -> int | None:
        """The rank whose arithmetic was wrong, if any."""
        return next(iter(self.events("faulty")), None)

    @property
    def broken(self) -> bool:
        """Whether a node is lost or a rank has failed; a rank that has saved and stopped has not failed."""
        return bool(self.lost) or any(event.fails for event in self.reported)

    @property
    def refused_its_configuration(self) -> bool:
        """Whether a rank has refused the run file, so that another attempt would fail, too."""
        return REFUSED in self.codes.values() and not any(one.step for one in self.heartbeats.values())

    @property
    def cause_is_known(self) -> bool:
        """Whether the rank that failed first is known, and its log is complete: the rank has ended, or hangs.

        A rank that hangs writes its stacks before it reports, and a stopped rank never ends. A rank that something
        outside the run has killed is the cause. Otherwise another rank may still turn out to be the cause.
        """
        rank = first_failed(self)
        if rank is None or rank not in {*self.codes, *self.gone, *self.events("hung")}:
            return False
        return self.was_killed(rank) or time.time() - self.ended > _SECONDS_FOR_THE_CAUSE

    def was_killed(self, rank: int) -> bool:
        """Whether something outside the run's code has ended a rank: the rank had reported no failure."""
        return rank in self.gone or (self.codes.get(rank, 0) < 0 and rank not in self.failed)


def error_of(attempt: Attempt, rank: int) -> str:
    """The error that a rank has reported; else the last error in its log; "" if there is none."""
    event = attempt.events("failed", "hung").get(rank)
    if event and any(event.lines):
        return "".join(event.lines)
    in_log = (line.removeprefix("error: ") for line in reversed(last_words(attempt, rank)) if _ERROR.match(line))
    return next(in_log, "")


def first_failed(attempt: Attempt) -> int | None:
    """The rank that made the attempt fail; None if it is unknown. The first of these that there is:

    1. the rank whose arithmetic was wrong;
    2. a rank that exited early, before any other rank failed;
    3. the first rank that ended with an error without reporting it: a signal killed it, or it exited by itself;
    4. if the first rank to report hangs, the rank that the others wait for;
    5. the first rank that reported a failure, even if it ends later than its victims.

    A rank whose error is a lost connection to another rank counts only if no other rank is known to have failed.
    """
    failing, failed, gone = [event for event in attempt.reported if event.fails], attempt.failed, attempt.gone
    if attempt.faulty is not None or not failing:
        return attempt.faulty
    ranks = dict.fromkeys(event.number for event in failing)
    lost_another = {rank for rank in ranks if rank not in gone and _LOST_CONNECTION.search(error_of(attempt, rank))}
    failing = [event for event in failing if event.number not in lost_another] or failing
    first = failing[0].number
    if first in gone:
        return first
    ended = next((event.number for event in failing if event.kind == "ended"), None)
    if ended is not None and ended not in failed:
        return ended
    if failed and failed[0] in attempt.events("hung"):
        awaited = _awaited(attempt.heartbeats)
        return failed[0] if awaited is None else awaited
    return first


def _awaited(heartbeats: dict[int, Heartbeat]) -> int | None:
    """The rank that the others wait for: one that is silent for longer than all others, else the one with the fewest
    marks; None if there is no such rank."""
    by_silence = sorted(heartbeats, key=lambda rank: heartbeats[rank].silent)
    if len(by_silence) > 1 and heartbeats[by_silence[-1]].silent - heartbeats[by_silence[-2]].silent > _SILENT:
        return by_silence[-1]
    by_marks = sorted(heartbeats, key=lambda rank: heartbeats[rank].marks)
    if len(by_marks) > 1 and heartbeats[by_marks[0]].marks < heartbeats[by_marks[1]].marks:
        return by_marks[0]
    return None


def how_it_failed(attempt: Attempt, rank: int) -> str:
    """How a rank failed: "rank 1 was killed by SIGKILL"."""
    code = attempt.codes.get(rank)
    if rank in attempt.gone:
        how = "exited with code 0 before the run's end"
    elif (hung := attempt.events("hung")) and (code is None or code > 0):
        own = attempt.heartbeats.get(rank)
        how = "makes no progress" + (", and its process is stopped (SIGSTOP)" if own and own.stopped else "")
        others = len(hung.keys() - {rank})
        how += f"; {counted(others, 'rank')} waited for it" if others else ""
    elif code is None or (code < 0 and rank in attempt.failed):  # a rank that fails may abort at its end
        how = "failed"
    else:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"


def last_words(attempt: Attempt, rank: int) -> Sequence[str]:
    """The last lines of a rank's output."""
    ended = attempt.events("ended").get(rank)
    return (ended and ended.lines) or rank_logs.last_lines(rank_logs.rank_log(attempt.logs, rank))


def record(attempt: Attempt, code: int, run: Path) -> AttemptRecord:
    """The record, for `restarts`, of an attempt of `run` with the exit code `code`."""
    outcomes = {0: "finished", STOPPED: "stopped", REFUSED: "refused"}
    failed = code not in (0, STOPPED)
    rank = first_failed(attempt) if failed else None
    killed = bool(attempt.lost) or (rank is not None and attempt.was_killed(rank))
    cause = ", ".join(f"node {name} was lost: {reason}" for name, reason in attempt.lost.items())
    if not cause and failed:
        cause = how_it_failed(attempt, rank) if rank is not None else NO_RANK_FAILED
    words = [line for line in last_words(attempt, rank) if line.strip()] if rank is not None else []
    steps = [heartbeat.step for heartbeat in attempt.heartbeats.values()]
    firsts = [one.first_step for one in attempt.heartbeats.values() if one.first_step is not None]
    return AttemptRecord(
        attempt=rank_logs.attempt(attempt.logs),
        outcome=outcomes.get(code, "failed"),  # type: ignore[arg-type]
        began=attempt.began,
        ended=attempt.ended,
        trained_from=attempt.read - min(firsts) if firsts else None,
        step=max(steps, default=0) or None,
        rank=rank,
        cause=cause,
        error=(rank_logs.refusal(attempt.logs) if failed else None) or (words[-1].strip() if words else ""),
        killed=killed,
        checkpoint=max(all_steps(run), default=0),
        faulty_node="" if attempt.faulty is None else attempt.nodes[attempt.faulty],
    )
