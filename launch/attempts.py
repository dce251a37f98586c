"""The attempts of a run under one head: after one that has failed, the next begins by itself."""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted, duration
from launch.agent_pool import Agent
from launch.attempt import Attempt, record
from launch.head import StopRequests, result, stop_requests, watch
from launch.nodes import Access, Node, Nodes, Run, number_of_ranks, this_machine
from pretrain.config import RunConfig
from pretrain.hardware import count_gpus
from pretrain.run import restarts, status
from pretrain.run.restarts import AttemptRecord
from pretrain.run.status import Status
from pretrain.trainer.preflight import is_finished, preflight, unchecked

NOTHING_STARTED = "stopped before any rank was started: nothing was saved, and the same command starts the run again"


@dataclass(frozen=True)
class Ended:
    """The exit code of a run. `interrupted`: the scheduler, its time limit or a lost node has ended it, not the user,
    so it should go on."""

    code: int
    interrupted: bool


def launch(run: Run, nodes: list[Node], access: Access, here: bool = False) -> Ended:
    """Makes attempts until the run ends, or loses a node and can't go on with the others.

    `here`: whether this machine is the only node.
    """
    config = load(run.path, run.overrides, RunConfig)
    setup = preflight(config, number_of_ranks(nodes), run.fresh, here=here, folder=run.path.parent)
    if is_finished(setup):
        return Ended(0, False)
    if run.fresh:
        status.move_aside(setup.directory)
    with stop_requests(setup.directory) as requests, Nodes(run, config, nodes, access, requests) as reached:
        return _Attempts(reached, run, config, requests).until_over()


def launch_local(run: Run, ranks: int | None, dry_run: bool = False) -> int:
    """Makes attempts with `ranks` processes on this machine; returns the exit code of the run.

    With `dry_run`, nothing is started, and corpora may be missing.
    """
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        has = f"this machine has {counted(gpus, 'GPU')}"
        raise UserError(f"--ranks: {ranks}, but {has}; DS_ACCELERATOR=cpu in the environment trains on the CPU")
    ranks = ranks or gpus or 1
    if not dry_run:
        return launch(run, *this_machine(ranks), here=True).code
    config, folder = load(run.path, run.overrides, RunConfig), run.path.parent
    if not unchecked(config, ranks, folder):
        setup = preflight(config, ranks, run.fresh, may_train=True, folder=folder)
        step, steps = setup.train_state.step, config.run.max_steps
        where = counted(ranks, "GPU" if gpus else "rank")
        print(f"{run.path} is valid: {where}, {setup.directory}, steps {step:,} to {steps:,}; nothing was started")
    return 0


class _Attempts:
    """The attempts of a run so far; `failures` has those that failed."""

    def __init__(self, nodes: Nodes, run: Run, config: RunConfig, requests: StopRequests):
        self.failures: list[AttemptRecord] = []
        self._nodes, self._run, self._requests = nodes, run, requests
        self._faults, self._directory = config.faults, Path(config.run.directory)
        self._began = time.monotonic()

    def until_over(self) -> Ended:
        """Makes attempts until the run ends, or fails in a way that another attempt wouldn't mend."""
        while True:
            try:
                if not self._nodes.ready():
                    print(NOTHING_STARTED, file=sys.stderr, flush=True)
                    return Ended(STOPPED, self._requests.by_scheduler)
                last = self.failures[-1].ended if self.failures else None
                follows = restarts.left(self.failures, self._faults.restarts, time.time()) > 0
                patience = self._faults.dead_rank_seconds
                attempt = watch(self._start, self._directory, self._requests, patience, last, follows)
            except FailedError as error:
                if not self.failures:
                    raise
                print(error, file=sys.stderr, flush=True)
                return Ended(1, True)
            if ended := self.end_after(attempt):
                return ended

    def _start(self, logs: Path) -> list[Agent]:
        earlier = {restarts.EARLIER: str(time.monotonic() - self._began)} if self.failures else {}
        return self._nodes.start(logs, earlier)

    def end_after(self, attempt: Attempt) -> Ended | None:
        """How the run has ended with `attempt`; None, after a while, if another attempt follows."""
        requests, directory = self._requests, self._directory
        code = result(attempt, directory, requests)
        recorded = record(attempt, code, directory)
        with contextlib.suppress(OSError):  # a full disk is reported by others
            restarts.add(directory, recorded)
        if code != 1 or requests.stop_signal is not None or status.stop_requested(directory):
            return Ended(code, code == STOPPED and _interrupted(self._run, directory, requests))
        self.failures.append(recorded)
        if attempt.lost:
            if not self._nodes.leave_out(list(attempt.lost)):
                return self._failed(recorded, "", interrupted=True)
        elif node := restarts.faulty_again(self.failures):
            if self._run.min_nodes is None or not self._nodes.leave_out([node]):
                return self._failed(recorded, _without(node))
        elif (reason := restarts.refusal(self.failures, self._faults.restarts)) is not None:
            return self._failed(recorded, reason)
        seconds = restarts.seconds_to_wait(self.failures)
        when = f" in {duration(seconds)}" if seconds else ""
        print(f"starting attempt {recorded.attempt + 1}{when} (faults.restarts)", file=sys.stderr, flush=True)
        requests.wait(seconds)
        return Ended(code, False) if requests.signals else None

    def _failed(self, record: AttemptRecord, reason: str, interrupted: bool = False) -> Ended:
        """Ends the run, which has failed for good; `reason`: why no attempt follows."""
        if reason:
            print(f"no further attempt: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            status.write(self._directory, Status("failed", record.attempt, record.checkpoint, reason=reason))
        return Ended(1, interrupted)


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
