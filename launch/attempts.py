"""Makes the attempts of a run: after a failed attempt, the next one starts by itself."""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.base.command import STOPPED
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import counted, duration
from data_pipeline.base.processes import PYTHON, caught
from launch.agent import is_loopback
from launch.attempt import REFUSED, Attempt, record
from launch.head import StopRequests, result, watch
from launch.nodes import Access, Agent, AgentPool, Node
from launch.protocol import Start
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.hardware import count_gpus
from pretrain.run import rank_environment, restarts, status
from pretrain.run.restarts import AttemptRecord
from pretrain.run.status import Status
from pretrain.run.world import node_name
from pretrain.training.preflight import NOT_FRESH, is_finished, note_death, preflight, unchecked
from pretrain.training.tracking import tracker

NOTHING_STARTED = "stopped before this attempt started any rank; run the same command to continue"
_REPLACE = (
    "Remove the node, or replace the processor or GPU that the log names, and run the same command again. On several "
    "nodes, --min-nodes lets the others continue at once"
)


@dataclass(frozen=True)
class Run:
    """A run to train. `fresh`: rename an existing run directory. `min_nodes`: None: a run that loses a node ends."""

    path: Path
    overrides: list[str]
    stop_at_step: int | None = None
    fresh: bool = False
    min_nodes: int | None = None

    @property
    def rank(self) -> list[str]:
        """The command of a rank."""
        stop = ["--stop-at-step", str(self.stop_at_step)] if self.stop_at_step else []
        train = [*PYTHON, "-u", "-m", "pretrain", "train"]
        return [*train, str(self.path.absolute()), *self.overrides, *stop]


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code. `interrupted`: the run should resume, since the scheduler, a time limit or a lost
    node has ended it, not the user."""

    code: int
    interrupted: bool


def launch(run: Run, nodes: list[Node], access: Access, here: bool = False) -> Ended:
    """Makes attempts until a run ends or can't continue without a lost node. `here`: this machine is the only node."""
    with contextlib.ExitStack() as stack:
        warned = stack.enter_context(caught(numbers=[signal.SIGUSR1]))  # it would end this process: no requeue
        config = load(run.path, run.overrides, RunConfig)
        setup = preflight(config, _number_of_ranks(nodes), run.fresh, here=here, folder=run.path.parent)
        if is_finished(setup):
            return Ended(0, False)
        note_death(setup.directory)
        if run.fresh:
            status.move_aside(setup.directory)
        requests = StopRequests(setup.directory)
        stack.enter_context(caught(requests.on_signal))
        for number in warned:
            requests.on_signal(number)
        ended = stack.enter_context(Attempts(run, config, nodes, access, requests)).until_over()
    if run.fresh and ended.code in (1, STOPPED):
        print(NOT_FRESH, file=sys.stderr, flush=True)
    return ended


def launch_local(run: Run, ranks: int | None, dry_run: bool = False) -> int:
    """Makes attempts with `ranks` processes on this machine; returns the exit code of the run.

    `dry_run`: starts nothing, and corpora may be missing.
    """
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        has = f"this machine has {counted(gpus, 'GPU')}"
        raise UserError(f"--ranks: {ranks}, but {has}; DS_ACCELERATOR=cpu in the environment trains on the CPU")
    ranks = ranks or gpus or 1
    if not dry_run:
        return launch(run, [Node(node_name(), ranks)], Access(), here=True).code
    config, folder = load(run.path, run.overrides, RunConfig), run.path.parent
    if not unchecked(config, ranks, folder):
        setup = preflight(config, ranks, run.fresh, may_train=True, folder=folder)
        step, steps = setup.train_state.step, config.run.max_steps
        where = counted(ranks, "GPU" if gpus else "rank")
        print(f"{run.path} is valid: {where}, {setup.directory}, steps {step:,} to {steps:,}; nothing was started")
    return 0


class Attempts:
    """The attempts of a run on `nodes`. `failures`: the failed attempts. All agents end with the `with` block."""

    def __init__(self, run: Run, config: RunConfig, nodes: list[Node], access: Access, requests: StopRequests):
        self.nodes = nodes
        self.failures: list[AttemptRecord] = []
        self._run, self._access, self._requests = run, access, requests
        self._batch, self._faults, self._directory = config.batch, config.faults, Path(config.run.directory)
        self._pool: AgentPool | None = None
        self._reached = False  # whether all nodes have been reached before
        self._on_gpus = False  # whether ranks have had GPUs before
        self._began = time.monotonic()

    def until_over(self) -> Ended:
        """Makes attempts until the run ends, or another attempt would be of no use."""
        while True:
            try:
                if not self.ready():
                    return self._stopped()
                follows = restarts.left(self.failures, self._faults.max_restarts, time.time()) > 0
                patience = self._faults.dead_rank_seconds
                names = [node.name for node in self.nodes for _ in range(node.ranks)]
                attempt = watch(self._start, names, self._directory, self._requests, patience, follows)
            except UserError as error:  # nodes can't be reached again, have fewer GPUs, or can't start their ranks
                if not self.failures:
                    raise
                return self._failed(self.failures[-1], "; ".join(str(error).splitlines()), interrupted=True)
            if ended := self.end_after(attempt):
                return ended

    def ready(self) -> bool:
        """Reaches the nodes; returns False if a request to stop comes first.

        Raises FailedError if a node can't be reached, UserError if its GPUs or its network don't suffice.
        """
        waits = iter(self._access.waits if self._reached else ())
        while self._pool is None and not self._requests.made:
            if (problem := self._reach()) is None or self._requests.made:
                break
            seconds = next(waits, None)
            if seconds is None:
                raise FailedError(problem)
            print(f"{problem}; trying again in {seconds} s", file=sys.stderr, flush=True)
            self._requests.wait(seconds)
        return not self._requests.made

    def _reach(self) -> str | None:
        """Starts an agent on each node; returns why that failed, None if it succeeded."""
        self._pool = pool = AgentPool([node.name for node in self.nodes], self._access)
        pool.connect(give_up=lambda: self._requests.made or pool.problems)
        if problems := pool.problems:
            self._close()
            return "\n".join(f"{name}: {reason}" for name, reason in problems.items())
        if not self._requests.made:
            self._reached = True
            self._on_gpus = _check(self.nodes, pool.agents, self._on_gpus)
        return None

    def _start(self, logs: Path) -> list[Agent]:
        """Starts the ranks of an attempt, which write their logs to `logs`."""
        assert self._pool
        agents = self._pool.agents
        first = agents[0].machine
        assert first
        environment = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.port)}
        environment |= {rank_environment.COMMAND: rank_environment.command()}
        environment |= {"WORLD_SIZE": str(_number_of_ranks(self.nodes)), "CROSS_SIZE": str(len(agents))}
        if self.failures:
            environment[restarts.EARLIER] = str(time.monotonic() - self._began)
        start = Start(self._run.rank, environment, logs=str(logs), hang_seconds=self._faults.hang_timeout_seconds)
        ranks = iter(range(_number_of_ranks(self.nodes)))
        for number, (agent, node) in enumerate(zip(agents, self.nodes, strict=True)):
            own = list(itertools.islice(ranks, node.ranks))
            agent.start(replace(start, environment={**environment, "CROSS_RANK": str(number)}, ranks=own))
        return agents

    def end_after(self, attempt: Attempt) -> Ended | None:
        """How the run has ended with `attempt`. If another attempt may follow, waits until it may start, or until a
        request to stop; returns None."""
        requests, directory = self._requests, self._directory
        code = result(attempt, directory, requests)
        recorded = record(attempt, code, directory)
        with contextlib.suppress(OSError):  # `result` has reported a full disk
            restarts.add(directory, recorded)
        if code == 1 and requests.made:
            return self._failed_to_stop(recorded, bool(attempt.lost))
        if code == REFUSED and status.read(directory).attempt in {one.attempt for one in (*self.failures, recorded)}:
            self._failed(recorded, "")  # the status is still "running", and no other run has begun since
        if code != 1:
            return Ended(code, code == STOPPED and requests.interrupted(self._run.stop_at_step))
        self.failures.append(recorded)
        reason = restarts.refusal(self.failures, self._faults.max_restarts)
        may_lose_nodes = self._run.min_nodes is not None
        if attempt.lost:
            if not self.leave_out(list(attempt.lost)):
                return self._failed(recorded, "", interrupted=True)
            reason = None if may_lose_nodes else reason  # each node is left out once
        elif node := restarts.faulty_again(self.failures):
            if not (may_lose_nodes and self.leave_out([node])):
                return self._failed(recorded, f"the arithmetic of {node} was wrong twice. {_REPLACE}")
            reason = None
        if reason is not None:
            return self._failed(recorded, reason)
        seconds = restarts.seconds_to_wait(self.failures)
        when = f" in {duration(seconds)}" if seconds else ""
        print(f"starting attempt {recorded.attempt + 1}{when} (faults.max_restarts)", file=sys.stderr, flush=True)
        requests.wait(seconds, self._pool.poll if self._pool else lambda: None)
        return None

    def leave_out(self, lost: Sequence[str]) -> bool:
        """Makes the next attempt begin without the nodes `lost`; returns whether the other nodes can continue."""
        self._close()  # agents of the other nodes, too: their ranks get new numbers
        if self._run.min_nodes is None:
            return bool(self._access.waits) and self._faults.max_restarts > 0
        left = [node for node in self.nodes if node.name not in lost]
        firsts = (left[:number] for number in range(len(left), self._run.min_nodes - 1, -1))
        shared = (some for some in firsts if not BatchPlan(self._batch, _number_of_ranks(some)).problems())
        self.nodes = next(shared, [])
        if self.nodes:
            names = ", ".join(node.name for node in self.nodes)
            nodes, ranks = counted(len(self.nodes), "node"), counted(_number_of_ranks(self.nodes), "rank")
            print(f"continuing on {nodes} ({names}), {ranks}", file=sys.stderr, flush=True)
        return bool(self.nodes)

    def _stopped(self) -> Ended:
        """Records that the run has stopped on request while no rank was running."""
        if not self.failures:
            print(NOTHING_STARTED, file=sys.stderr, flush=True)
        else:
            last, by_file = self.failures[-1], self._requests.stop_signal is None
            if self._record_end(last, Status("stopped", last.attempt, last.checkpoint, stop_file=by_file), "KILLED"):
                tracker.sync_apart(self._directory)
            resumes = f"the same command resumes the run{f' from step {last.checkpoint:,}' if last.checkpoint else ''}"
            print(f"stopped before attempt {last.attempt + 1}; {resumes}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            status.clear_stop(self._directory)
        return Ended(STOPPED, self._requests.by_scheduler)

    def _failed_to_stop(self, record: AttemptRecord, lost: bool) -> Ended:
        """Records that the run has failed after a request to stop. `lost`: it has lost a node.

        After the warning of the scheduler, the run should resume if another attempt would have followed.
        """
        killed = len(self._requests.signals) > 1
        self._record_failure(record, f"it {'was killed' if killed else 'failed'} before it had stopped")
        follows = restarts.refusal([*self.failures, record], self._faults.max_restarts) is None
        return Ended(1, self._requests.by_scheduler and (lost or (follows and not killed)))

    def _failed(self, record: AttemptRecord, reason: str, interrupted: bool = False) -> Ended:
        """Records that the run has failed. `reason`: why no other attempt follows."""
        if reason:
            print(f"no further attempt: {reason}", file=sys.stderr, flush=True)
        if self._record_failure(record, reason):
            tracker.sync_apart(self._directory)
        return Ended(1, interrupted)

    def _record_failure(self, record: AttemptRecord, reason: str) -> bool:
        return self._record_end(record, Status("failed", record.attempt, record.checkpoint, reason=reason), "FAILED")

    def _record_end(self, last: AttemptRecord, end: Status, in_mlflow: tracker.Status) -> bool:
        """Records how the run has ended after its `last` attempt; returns whether MLflow still needs to be told."""
        with contextlib.suppress(OSError):
            status.write(self._directory, end)
            return tracker.record_end(self._directory, last.ended, in_mlflow)
        return False

    def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> "Attempts":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _number_of_ranks(nodes: Sequence[Node]) -> int:
    return sum(node.ranks for node in nodes)


def _check(nodes: Sequence[Node], agents: Sequence[Agent], on_gpus: bool = False) -> bool:
    """Raises UserError if a node has fewer GPUs than ranks, or can't reach the first node.

    If no node has a GPU, all ranks run on the CPU, unless they had GPUs before (`on_gpus`). Returns whether they have
    GPUs now.
    """
    machines = [agent.machine for agent in agents if agent.machine]
    has_gpus = any(machine.gpus for machine in machines)
    problems = [
        f"{node.name}: {node.ranks} ranks, but it has {machine.gpus} GPUs"
        for node, machine in zip(nodes, machines, strict=True)
        if machine.gpus < node.ranks
    ]
    if problems and (has_gpus or on_gpus):
        raise UserError("\n".join(problems))
    here = [is_loopback(machine.address) for machine in machines]
    if here[0] and not all(here):
        raise UserError(f"{nodes[0].name}: the other nodes can't find it at {machines[0].address}; name its address")
    return has_gpus
