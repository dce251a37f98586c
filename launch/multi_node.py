"""A run on several nodes: an agent on each, attempt after attempt as long as enough nodes are left."""

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted
from launch.agent_pool import Agent, AgentPool
from launch.head import Attempt, NodeRanks, StopRequests, result, stop_requests, watch
from launch.protocol import StartRanks
from launch.rank_commands import node_options
from pretrain.config import RunConfig
from pretrain.run import status
from pretrain.trainer.preflight import is_finished, move_aside, preflight

NOTHING_STARTED = "stopped before any rank was started: nothing was saved, and the same command starts the run again"


@dataclass(frozen=True)
class Node:
    """A machine, by its name for ssh or SLURM, and the number of ranks on it."""

    name: str
    ranks: int


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
class Access:
    """How the head reaches nodes, through ssh or srun.

    `start` starts one agent for each node, or for each rank if `agent_per_rank`. `address` is where agents find the
    head. `master` gives the address and port at which the ranks meet, from the agent that has rank 0.
    """

    start: Callable[[AgentPool, list[Node]], None]
    agent_per_rank: bool
    address: str
    master: Callable[[Agent], tuple[str, int]]


@dataclass(frozen=True)
class Ended:
    """The exit code of a run. `interrupted`: the scheduler, its time limit or a lost node has ended it, not the user,
    so it should go on."""

    code: int
    interrupted: bool


def launch(run: Run, nodes: list[Node], access: Access) -> Ended:
    """Runs attempts until the run ends, or loses a node and can't go on with the others."""
    config = load(run.path, run.overrides, RunConfig)
    setup = preflight(config, _ranks(nodes), run.fresh, here=False)
    directory = setup.directory
    if is_finished(setup):
        return Ended(0, False)
    if run.fresh:
        move_aside(setup)
    with stop_requests(directory) as requests:
        while True:
            attempt = _attempt(run, config, nodes, access, requests)
            if attempt is None:
                print(NOTHING_STARTED, file=sys.stderr, flush=True)
                return Ended(STOPPED, requests.by_scheduler)
            code = result(attempt, directory, requests)
            if code != 1 or not attempt.lost or requests.signals:
                return Ended(code, code == STOPPED and _interrupted(run, directory, requests))
            left = [node for node in nodes if node.name not in attempt.lost]
            nodes = _usable(config, left, run.min_nodes)
            if not nodes:
                return Ended(code, True)
            names = ", ".join(node.name for node in nodes)
            remaining = f"{counted(len(nodes), 'node')} ({names}), {counted(_ranks(nodes), 'rank')}"
            print(f"going on with {remaining}", file=sys.stderr, flush=True)


def _ranks(nodes: Sequence[Node]) -> int:
    return sum(node.ranks for node in nodes)


def _usable(config: RunConfig, left: list[Node], least: int | None) -> list[Node]:
    """As many of the nodes as can share the run's batches; none if these are fewer than `least`."""
    for number in range(len(left), (least or len(left) + 1) - 1, -1):
        if not config.batch.problems(_ranks(left[:number])):
            return left[:number]
    return []


def _interrupted(run: Run, directory: Path, requests: StopRequests) -> bool:
    """Whether the scheduler or `run.max_hours` has stopped a run, rather than the user."""
    if requests.stop_signal is not None:
        return requests.by_scheduler
    now = status.read(directory)
    return not now.stop_file and now.step != run.stop_at_step


def _attempt(run: Run, config: RunConfig, nodes: list[Node], access: Access, requests: StopRequests) -> Attempt | None:
    """One attempt; None if a signal came before it began. Raises FailedError if agents can't be started."""
    per_rank = access.agent_per_rank
    where = [node for node in nodes for _ in range(node.ranks if per_rank else 1)]  # the node of each agent
    with AgentPool([node.name for node in where], access.address) as pool:
        access.start(pool, nodes)
        pool.connect(give_up=lambda: requests.signals or pool.problems)
        if requests.signals:
            return None
        if pool.problems:
            raise FailedError("\n".join(f"{name}: {reason}" for name, reason in pool.problems.items()))
        agents = [pool.agents[index] for index in range(len(where))]
        if not per_rank:
            _check_gpus(nodes, agents)
        address, port = access.master(agents[0])
        ranks = {node.name: node.ranks for node in nodes}

        def start(logs: Path) -> list[NodeRanks]:
            for number, (agent, node) in enumerate(zip(agents, where, strict=True)):
                request = StartRanks(
                    ranks=1 if per_rank else node.ranks,
                    local_ranks=node.ranks,
                    logs=str(logs),
                    deepspeed=None if per_rank else node_options(ranks, number, address, port),
                    arguments=run.arguments,
                    environment={"MASTER_ADDR": address, "MASTER_PORT": str(port)},
                )
                agent.start_ranks(request)
            return list(agents)

        return watch(start, Path(config.run.directory), requests, config.faults.dead_rank_seconds)


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
