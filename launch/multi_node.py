"""A run on several nodes: an agent on each, and attempt after attempt as long as enough nodes are left."""

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted
from launch.agent_pool import Agent, AgentPool
from launch.attempts import Ended, Run, run_attempts
from launch.head import NodeRanks, StopRequests, stop_requests
from launch.protocol import StartRanks
from launch.rank_commands import node_options
from pretrain.config import RunConfig
from pretrain.trainer.preflight import is_finished, move_aside, preflight

_WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # s, for a node that was lost and can't be reached: it may start anew
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Node:
    """A machine, by its name for ssh or SLURM, and the number of ranks on it."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Access:
    """How the head reaches nodes, through ssh or srun.

    `start` starts one agent for each node, or for each rank if `agent_per_rank`. `address` is where agents find the
    head. `master` gives the address and port at which the ranks meet, from the agent that has rank 0. `tries_again`:
    whether a node that was lost may be reached again at once.
    """

    start: Callable[[AgentPool, list[Node]], None]
    agent_per_rank: bool
    address: str
    master: Callable[[Agent], tuple[str, int]]
    tries_again: bool = False


def launch(run: Run, nodes: list[Node], access: Access) -> Ended:
    """Makes attempts until the run ends, or loses a node and can't go on with the others."""
    config = load(run.path, run.overrides, RunConfig)
    setup = preflight(config, _ranks(nodes), run.fresh, here=False, folder=run.path.parent)
    if is_finished(setup):
        return Ended(0, False)
    if run.fresh:
        move_aside(setup)
    with stop_requests(setup.directory) as requests, AgentRanks(run, config, nodes, access, requests) as ranks:
        return run_attempts(ranks, run, config, requests)


def _ranks(nodes: Sequence[Node]) -> int:
    return sum(node.ranks for node in nodes)


def _usable(config: RunConfig, left: list[Node], least: int | None) -> list[Node]:
    """As many of the nodes as can share the run's batches; none if these are fewer than `least`."""
    for number in range(len(left), (least or len(left) + 1) - 1, -1):
        if not config.batch.problems(_ranks(left[:number])):
            return left[:number]
    return []


class AgentRanks:
    """The ranks of `nodes`, for one attempt of a run after another. No agent outlives the `with` block."""

    def __init__(self, run: Run, config: RunConfig, nodes: list[Node], access: Access, requests: StopRequests):
        self._run, self._config, self._nodes, self._access = run, config, nodes, access
        self._requests = requests
        self._pool: AgentPool | None = None
        self._reached = False  # whether all nodes have been reached before

    @property
    def _where(self) -> list[Node]:
        """The node of each agent."""
        return [node for node in self._nodes for _ in range(node.ranks if self._access.agent_per_rank else 1)]

    @property
    def _agents(self) -> list[Agent]:
        assert self._pool is not None
        return [self._pool.agents[index] for index in range(len(self._where))]

    def ready(self) -> bool:
        if self._pool is not None:
            return True
        problem = self._reach()
        for seconds in _WAITS if self._reached and self._access.tries_again else ():
            if problem is None or self._requests.signals:
                break
            print(f"{problem}; trying again in {seconds} s", file=sys.stderr, flush=True)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not self._requests.signals:
                time.sleep(_POLL_SECONDS)
            problem = self._reach()
        if self._requests.signals:
            return False
        if problem is not None:
            raise FailedError(problem)
        self._reached = True
        if not self._access.agent_per_rank:
            _check_gpus(self._nodes, self._agents)
        return True

    def _reach(self) -> str | None:
        """Starts an agent on each node; returns why that isn't possible, None if it is."""
        self._pool = pool = AgentPool([node.name for node in self._where], self._access.address)
        self._access.start(pool, self._nodes)
        pool.connect(give_up=lambda: self._requests.signals or pool.problems)
        if not pool.problems:
            return None
        self._close(run_goes_on=True)
        return "\n".join(f"{name}: {reason}" for name, reason in pool.problems.items())

    def start(self, logs: Path, environment: dict[str, str]) -> Sequence[NodeRanks]:
        address, port = self._access.master(self._agents[0])
        environment = {**environment, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        per_rank, ranks = self._access.agent_per_rank, {node.name: node.ranks for node in self._nodes}
        for number, (agent, node) in enumerate(zip(self._agents, self._where, strict=True)):
            agent.start_ranks(
                StartRanks(
                    ranks=1 if per_rank else node.ranks,
                    local_ranks=node.ranks,
                    logs=str(logs),
                    deepspeed=None if per_rank else node_options(ranks, number, address, port),
                    arguments=self._run.arguments,
                    environment=environment,
                    hang_seconds=self._config.faults.hang_seconds,
                )
            )
        return self._agents

    def leave_out(self, lost: Sequence[str]) -> bool:
        self._close(run_goes_on=True)  # the others' agents too: they start anew with the ranks of fewer nodes
        if self._run.min_nodes is None:
            return self._access.tries_again and self._config.faults.restarts > 0
        left = [node for node in self._nodes if node.name not in lost]
        self._nodes = _usable(self._config, left, self._run.min_nodes)
        if self._nodes:
            names = ", ".join(node.name for node in self._nodes)
            remaining = f"{counted(len(self._nodes), 'node')} ({names}), {counted(_ranks(self._nodes), 'rank')}"
            print(f"going on with {remaining}", file=sys.stderr, flush=True)
        return bool(self._nodes)

    def _close(self, run_goes_on: bool = False) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(run_goes_on)

    def __enter__(self) -> "AgentRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _check_gpus(nodes: list[Node], agents: list[Agent]) -> None:
    """Raises UserError if nodes have fewer GPUs than ranks; on nodes that all have none, the ranks are on the CPU."""
    problems = [
        f"{node.name}: {node.ranks} ranks, but it has {agent.handshake.gpus} GPUs"
        for node, agent in zip(nodes, agents, strict=True)
        if agent.handshake.gpus < node.ranks
    ]
    if problems and any(agent.handshake.gpus for agent in agents):
        raise UserError("\n".join(problems))


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Raises UserError if the name doesn't resolve."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{host}: can't be reached: {error.strerror}") from None
