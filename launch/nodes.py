"""The nodes of a run, with an agent on each, as long as enough of them are left."""

import base64
import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted
from launch.agent_pool import Agent, AgentPool
from launch.head import StopRequests
from launch.protocol import Start
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.hardware import free_port
from pretrain.run import node_memory

_WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # s, for a node that was lost and can't be reached: it may start anew
_LOOPBACK = "127.0.0.1"


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
class Node:
    """A machine, by its name for ssh or SLURM, and the number of ranks on it."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Access:
    """How the head reaches nodes: through ssh or srun, or because it is on the only one.

    `start` starts one agent for each node, or for each rank if `agent_per_rank`. `address` is where agents find the
    head. `master` gives the address and port at which the ranks meet, from the agent that has rank 0. `tries_again`:
    whether a node that was lost may be reached again at once.
    """

    start: Callable[[AgentPool, list[Node]], None]
    agent_per_rank: bool
    address: str
    master: Callable[[Agent], tuple[str, int]]
    tries_again: bool = False


def this_machine(ranks: int) -> tuple[list[Node], Access]:
    """This machine as the only node, with `ranks`."""
    access = Access(lambda pool, _: pool.start_here(), False, _LOOPBACK, lambda _: (_LOOPBACK, free_port()))
    return [Node(node_memory.node_name(), ranks)], access


def number_of_ranks(nodes: Sequence[Node]) -> int:
    return sum(node.ranks for node in nodes)


def deepspeed_launcher(nodes: Sequence[Node], number: int, address: str, port: int) -> list[str]:
    """DeepSpeed's launcher on the node `number` of `nodes`, before the command of a rank.

    The ranks meet at `address` and `port`. The program `deepspeed --no_ssh` would start the same launcher, but import
    PyTorch and DeepSpeed twice before.
    """
    world = json.dumps({node.name: list(range(node.ranks)) for node in nodes})
    encoded = base64.urlsafe_b64encode(world.encode()).decode()
    program = [sys.executable, "-u", "-m", "launch.deepspeed_launcher", f"--world_info={encoded}"]
    program += [f"--node_rank={number}", f"--master_addr={address}", f"--master_port={port}"]
    return [*program, "--no_local_rank", "--quiet", "--no_python"]


class Nodes:
    """The `nodes` of a run, for one attempt after another. No agent outlives the `with` block."""

    def __init__(self, run: Run, config: RunConfig, nodes: list[Node], access: Access, requests: StopRequests):
        self._run, self._config, self._nodes, self._access = run, config, nodes, access
        self._requests = requests
        self._pool: AgentPool | None = None
        self._agents: list[Agent] = []
        self._reached = False  # whether all nodes have been reached before

    @property
    def _where(self) -> list[Node]:
        """The node of each agent."""
        return [node for node in self._nodes for _ in range(node.ranks if self._access.agent_per_rank else 1)]

    def ready(self) -> bool:
        """Reaches the nodes; returns False if a signal came before. Raises FailedError if one can't be reached."""
        if self._pool is not None:
            return True
        problem = self._reach()
        for seconds in _WAITS if self._reached and self._access.tries_again else ():
            if problem is None or self._requests.signals:
                break
            print(f"{problem}; trying again in {seconds} s", file=sys.stderr, flush=True)
            self._requests.wait(seconds)
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
            self._agents = [agent for _, agent in sorted(pool.agents.items())]
            return None
        self._close(run_goes_on=True)
        return "\n".join(f"{name}: {reason}" for name, reason in pool.problems.items())

    def start(self, logs: Path, environment: dict[str, str]) -> list[Agent]:
        """Starts an attempt's ranks, which write their logs to `logs`, with `environment` added to theirs."""
        address, port = self._access.master(self._agents[0])
        environment = {**environment, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        alone = self._access.agent_per_rank
        rank = [sys.executable, "-u", "-m", "pretrain", "train", *self._run.arguments]
        for number, (agent, node) in enumerate(zip(self._agents, self._where, strict=True)):
            agent.start(
                Start(
                    rank,
                    environment,
                    ranks=1 if alone else node.ranks,
                    local_ranks=node.ranks,
                    logs=str(logs),
                    launcher=[] if alone else deepspeed_launcher(self._nodes, number, address, port),
                    hang_seconds=self._config.faults.hang_seconds,
                )
            )
        return self._agents

    def leave_out(self, lost: Sequence[str]) -> bool:
        """Has the next attempt begin without the nodes `lost`; returns whether the others may go on."""
        self._close(run_goes_on=True)  # the others' agents too: they start anew with the ranks of fewer nodes
        if self._run.min_nodes is None:
            return self._access.tries_again and self._config.faults.restarts > 0
        left = [node for node in self._nodes if node.name not in lost]
        firsts = (left[:number] for number in range(len(left), self._run.min_nodes - 1, -1))
        shared = (some for some in firsts if not BatchPlan(self._config.batch, number_of_ranks(some)).problems())
        self._nodes = next(shared, [])
        if self._nodes:
            names = ", ".join(node.name for node in self._nodes)
            nodes, ranks = counted(len(self._nodes), "node"), counted(number_of_ranks(self._nodes), "rank")
            print(f"going on with {nodes} ({names}), {ranks}", file=sys.stderr, flush=True)
        return bool(self._nodes)

    def _close(self, run_goes_on: bool = False) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(run_goes_on)

    def __enter__(self) -> "Nodes":
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
