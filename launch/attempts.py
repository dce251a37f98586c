"""The attempts of a run under one head: after one that has failed, the next begins by itself."""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import duration
from launch.attempt import REFUSED, Attempt, first_failed, how_it_ended, how_it_failed, last_words
from launch.head import NodeRanks, StopRequests, result, watch
from pretrain.checkpoint.directory import all_steps
from pretrain.config import RunConfig
from pretrain.faults import restarts
from pretrain.faults.restarts import AttemptRecord
from pretrain.run import rank_logs, status
from pretrain.run.status import Status

NOTHING_STARTED = "stopped before any rank was started: nothing was saved, and the same command starts the run again"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Run:
    """What to run. `fresh` moves the run in the run directory aside.

    Without `min_nodes`, a run that has lost a node ends.
    """

    path: Path
    overrides: list[str]
    stop_at_step: int | None = None
    fresh: bool = False
    min_nodes: int | None = None

    @property
    def arguments(self) -> list[str]:
        """Those of `pretrain train`."""
        stop = ["--stop-at-step", str(self.stop_at_step)] if self.stop_at_step else []
        return [str(self.path.absolute()), *self.overrides, *stop]


@dataclass(frozen=True)
class Ended:
    """The exit code of a run. `interrupted`: the scheduler, its time limit or a lost node has ended it, not the user,
    so it should go on."""

    code: int
    interrupted: bool


class Ranks(Protocol):
    """Starts the ranks of one attempt after another."""

    def ready(self) -> bool:
        """Reaches the nodes; returns False if a signal came before. Raises FailedError if one can't be reached."""

    def start(self, logs: Path, environment: dict[str, str]) -> Sequence[NodeRanks]:
        """Starts an attempt's ranks, which write their logs to `logs`, with `environment` added to theirs."""

    def leave_out(self, lost: Sequence[str]) -> bool:
        """Has the next attempt begin without the nodes `lost`; returns whether the others may go on."""


def run_attempts(ranks: Ranks, run: Run, config: RunConfig, requests: StopRequests) -> Ended:
    """Makes attempts until the run ends, or fails in a way that another attempt wouldn't mend."""
    attempts = _Attempts(ranks, run, config, requests)
    while True:
        try:
            if not ranks.ready():
                print(NOTHING_STARTED, file=sys.stderr, flush=True)
                return Ended(STOPPED, requests.by_scheduler)
            attempt = attempts.watched()
        except FailedError as error:
            if not attempts.failures:
                raise
            print(error, file=sys.stderr, flush=True)
            return Ended(1, True)
        if ended := attempts.end_after(attempt):
            return ended


class _Attempts:
    """The attempts of a run so far; `failures` has those that failed."""

    def __init__(self, ranks: Ranks, run: Run, config: RunConfig, requests: StopRequests):
        self.failures: list[AttemptRecord] = []
        self._ranks, self._run, self._requests = ranks, run, requests
        self._faults, self._directory = config.faults, Path(config.run.directory)
        self._began = time.monotonic()

    def watched(self) -> Attempt:
        """Makes an attempt, and waits until it has ended. Raises FailedError if a node can't start its ranks."""
        return watch(
            self._start,
            self._directory,
            self._requests,
            self._faults.dead_rank_seconds,
            self._on_training,
            another_follows=restarts.left(self.failures, self._faults.restarts, time.time()) > 0,
        )

    def _start(self, logs: Path) -> Sequence[NodeRanks]:
        earlier = {restarts.EARLIER: str(time.monotonic() - self._began)} if self.failures else {}
        return self._ranks.start(logs, earlier)

    def _on_training(self) -> None:
        if self.failures:
            down = time.time() - self.failures[-1].ended
            print(f"training again, {down:.1f} s after the failure", file=sys.stderr, flush=True)

    def end_after(self, attempt: Attempt) -> Ended | None:
        """How the run has ended with `attempt`; None, after a while, if another attempt follows."""
        requests, directory = self._requests, self._directory
        code = result(attempt, directory, requests)
        record = _record(attempt, code, directory)
        with contextlib.suppress(OSError):  # a full disk is reported by others
            restarts.add(directory, record)
        if code != 1 or requests.stop_signal is not None or status.stop_requested(directory):
            return Ended(code, code == STOPPED and _interrupted(self._run, directory, requests))
        self.failures.append(record)
        if attempt.lost:
            if not self._ranks.leave_out(list(attempt.lost)):
                return self._failed(record, "", interrupted=True)
        elif node := restarts.faulty_again(self.failures):
            if self._run.min_nodes is None or not self._ranks.leave_out([node]):
                return self._failed(record, _without(node))
        elif (reason := restarts.refusal(self.failures, self._faults.restarts)) is not None:
            return self._failed(record, reason)
        _wait(restarts.seconds_to_wait(self.failures), attempt, requests)
        return Ended(code, False) if requests.signals else None

    def _failed(self, record: AttemptRecord, reason: str, interrupted: bool = False) -> Ended:
        """Ends the run, which has failed for good; `reason`: why no attempt follows."""
        if reason:
            print(f"no further attempt: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            status.write(self._directory, Status("failed", record.attempt, record.checkpoint, reason=reason))
        return Ended(1, interrupted)


def _record(attempt: Attempt, code: int, directory: Path) -> AttemptRecord:
    outcomes = {0: "finished", STOPPED: "stopped", REFUSED: "refused"}
    rank = first_failed(attempt) if code else None
    exited = attempt.codes.get(rank) if rank is not None else None
    by_signal = exited is not None and exited < 0 and rank not in attempt.failed
    launcher = attempt.launcher.code if attempt.launcher and rank is None else 0
    killed = bool(attempt.lost or rank in attempt.gone or by_signal or launcher < 0)
    cause = ", ".join(f"node {name} was lost: {reason}" for name, reason in attempt.lost.items())
    if not cause and code:
        cause = how_it_failed(attempt, rank) if rank is not None else how_it_ended("DeepSpeed's launcher", launcher)
    words = [line for line in last_words(attempt, rank) if line.strip()] if rank is not None and code else []
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
        error=(rank_logs.refusal(attempt.logs) if code else None) or (words[-1].strip() if words else ""),
        killed=killed,
        checkpoint=max(all_steps(directory), default=0),
        faulty_node=attempt.faulty_node,
    )


def _without(node: str) -> str:
    return (
        f"the arithmetic of {node} was found wrong twice. Take the node away, or exchange the processor or GPU that "
        "the log names, and run the same command again. On several nodes, --min-nodes has the others go on at once"
    )


def _interrupted(run: Run, directory: Path, requests: StopRequests) -> bool:
    """Whether the scheduler or `run.max_hours` has stopped a run, rather than the user."""
    if requests.stop_signal is not None:
        return requests.by_scheduler
    now = status.read(directory)
    return not now.stop_file and now.step != run.stop_at_step


def _wait(seconds: float, attempt: Attempt, requests: StopRequests) -> None:
    number = rank_logs.attempt(attempt.logs) + 1
    when = f" in {duration(seconds)}" if seconds else ""
    print(f"starting attempt {number}{when} (faults.restarts)", file=sys.stderr, flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not requests.signals:
        time.sleep(_POLL_SECONDS)
