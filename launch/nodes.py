"""A run on several nodes: an agent on each, attempt after attempt as long as enough nodes are left."""

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import counted
from launch.supervise.commands import node_options
from launch.supervise.events import Part
from launch.supervise.head import Attempt, StopRequests, result, stop_requests, watch
from launch.supervise.remote import Agent, Agents
from pretrain.checkpoint.choose import is_valid, newest
from pretrain.config import RunConfig
from pretrain.run import lock, status
from pretrain.trainer.validate import ValidatedRun, batch_layout, validate

NOTHING_BEGUN = "stopped before any rank was started: nothing was saved, and the same command starts the run again"


@dataclass(frozen=True)
class Node:
    """A machine, by the name that ssh or SLURM know, and the number of ranks on it."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Run:
    """What to run. Without `min_nodes`, no attempt follows one that has lost a node."""

    path: Path
    overrides: list[str]
    stop_at_step: int | None = None
    fresh: bool = False
    min_nodes: int | None = None

    def checked(self, ranks: int, may_train: bool = False) -> ValidatedRun:
        """The run as it stands; every problem is reported before anything starts.

        That a process trains there is a problem unless it `may_train`.
        """
        config = load(self.path, self.overrides, RunConfig)
        directory = Path(config.run.directory)
        if not may_train:
            lock.check(directory)
        setup = validate(config, 0, ranks, None if self.fresh else newest(directory), ranks_are_here=False)
        if self.fresh and (aside := status.move_aside(directory)):
            print(f"{directory}: moved the existing run to {aside}", flush=True)
        return setup

    @property
    def arguments(self) -> list[str]:
        """Those of `pretrain train`."""
        stop = ["--stop-at-step", str(self.stop_at_step)] if self.stop_at_step else []
        return [str(self.path.absolute()), *self.overrides, *stop]


@dataclass(frozen=True)
class Launcher:
    """How agents come to life on nodes, and how they start the ranks there.

    `start` starts one agent for each node, or for each rank if `agent_per_rank`. `address` is where agents find the
    head. `master` gives the address and port at which the ranks meet, from the agent that has rank 0.
    """

    start: Callable[[Agents, list[Node]], None]
    agent_per_rank: bool
    address: str
    master: Callable[[Agent], tuple[str, int]]


@dataclass(frozen=True)
class Ended:
    """The exit code of a run, and whether it has stopped or lost a node without anyone's wish: it is to go on."""

    code: int
    to_go_on: bool


def launch(run: Run, nodes: list[Node], launcher: Launcher) -> Ended:
    """Runs attempts until the run ends, or loses a node and can't go on with the others."""
    setup = run.checked(_ranks(nodes))
    config, directory = setup.config, setup.directory
    if setup.finished and setup.resume and is_valid(setup.resume):  # else the ranks resume from an earlier checkpoint
        print(setup.nothing_left)
        return Ended(0, False)
    with stop_requests(directory) as requests:
        while True:
            attempt = _attempt(run, config, nodes, launcher, requests)
            if attempt is None:
                print(NOTHING_BEGUN, file=sys.stderr, flush=True)
                return Ended(STOPPED, requests.by_scheduler)
            code = result(attempt, directory, requests)
            if code != 1 or not attempt.lost or requests.signals:
                return Ended(code, code == STOPPED and _to_go_on(run, directory, requests))
            left = [node for node in nodes if node.name not in attempt.lost]
            nodes = _usable(config, left, run.min_nodes)
            if not nodes:
                return Ended(code, True)
            names = ", ".join(node.name for node in nodes)
            left_over = f"{counted(len(nodes), 'node')} ({names}), {counted(_ranks(nodes), 'rank')}"
            print(f"going on with {left_over}", file=sys.stderr, flush=True)


def _ranks(nodes: Sequence[Node]) -> int:
    return sum(node.ranks for node in nodes)


def _usable(config: RunConfig, left: list[Node], least: int | None) -> list[Node]:
    """As many of the nodes as can share the run's batches; none if these are fewer than `least`."""
    for number in range(len(left), (least or len(left) + 1) - 1, -1):
        if not batch_layout(config, 0, _ranks(left[:number]))[1]:
            return left[:number]
    return []


def _to_go_on(run: Run, directory: Path, requests: StopRequests) -> bool:
    """Whether a run that has stopped did so for the scheduler's or its own hours' sake."""
    if requests.asked is not None:
        return requests.by_scheduler
    now = status.read(directory)
    return not now.stop_file and now.step != run.stop_at_step


def _attempt(
    run: Run, config: RunConfig, nodes: list[Node], launcher: Launcher, requests: StopRequests
) -> Attempt | None:
    """One attempt; None if a signal came before it began."""
    names = [node.name for node in nodes for _ in range(node.ranks if launcher.agent_per_rank else 1)]
    with Agents(names, launcher.address) as agents:
        launcher.start(agents, nodes)
        joined = agents.joined(lambda: bool(requests.signals))
        if requests.signals:
            return None
        _check(nodes, joined, launcher)
        address, port = launcher.master(joined[0])

        def start(logs: Path) -> list[Part]:
            ranks = {node.name: node.ranks for node in nodes}
            local_ranks = [node.ranks for node in nodes for _ in range(node.ranks if launcher.agent_per_rank else 1)]
            for number, (agent, local) in enumerate(zip(joined, local_ranks, strict=True)):
                options = None if launcher.agent_per_rank else node_options(ranks, number, address, port)
                message = {
                    "logs": str(logs),
                    "local_ranks": local,
                    "deepspeed": options,
                    "arguments": run.arguments,
                    "environment": {"MASTER_ADDR": address, "MASTER_PORT": str(port)},
                }
                agent.start(1 if launcher.agent_per_rank else local, message)
            return list(joined)

        return watch(start, Path(config.run.directory), requests, config.faults.dead_rank_seconds)


def _check(nodes: list[Node], joined: list[Agent], launcher: Launcher) -> None:
    """Raises UserError if nodes have fewer GPUs than ranks; on nodes that all have none, the ranks are on the CPU."""
    ranks = {node.name: node.ranks for node in nodes}
    gpus = {agent.name: agent.hello.gpus for agent in joined}
    if launcher.agent_per_rank or not any(gpus.values()):
        return
    if problems := [
        f"{name}: {ranks[name]} ranks, but it has {number} GPUs"
        for name, number in gpus.items()
        if number < ranks[name]
    ]:
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
