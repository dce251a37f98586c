"""The nodes of a run, and the head's side of the connections to their agents.

On the head's own machine, the head's process does an agent's work.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_pipeline.base.processes import Process, ProcessGroup, until
from launch.agent import NodeProcesses
from launch.protocol import TIMEOUT_SECONDS, Connection, Event, Machine, Start
from pretrain.run.heartbeat import Heartbeat

_SECONDS_TO_CONNECT, _SECONDS_TO_END, _POLL_SECONDS = 300.0, 90.0, 0.1


@dataclass(frozen=True)
class Node:
    """A machine: its name for ssh or SLURM, and its number of ranks."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Access:
    """How the head reaches nodes: through ssh or srun, or because it runs on the only node.

    Attributes:
        command: returns the command that starts an agent on a named node. None: the head's own machine.
        environment: variables that are added to the agent's environment.
        head: the head's address in the network of the nodes. None: ssh tells it.
        waits: seconds between tries to reach a lost node, which may be rebooting. (): a lost node is given up.
    """

    command: Callable[[str], list[str]] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    head: str | None = None
    waits: Sequence[float] = ()


class Agent:
    """The head's side of an agent.

    Attributes:
        machine: the node's machine; None until the agent is connected.
        heartbeats: the last heartbeats of the ranks, once they have ended.
        ends: whether the agent is ending its processes, during which it may be silent.
    """

    def __init__(self, name: str, connection: Connection | NodeProcesses, process: Process | None = None):
        self.name, self.connection, self._process = name, connection, process
        self.machine: Machine | None = None
        self.heartbeats: dict[int, Heartbeat] = {}
        self.ends = False
        self._events: list[Event] = []

    @property
    def lost(self) -> str | None:
        """Why the agent counts as lost; None while it answers. `poll` updates this."""
        if self._process and (code := self._process.code) is not None:
            self.poll()  # its last messages
            last_lines = "; ".join(self.connection.other_lines) or "it said nothing"
            return f"{self._process.program} ended with exit code {code}: {last_lines}"
        seconds = _SECONDS_TO_CONNECT
        if self.machine:
            seconds = _SECONDS_TO_END if self.ends else TIMEOUT_SECONDS
        return f"no message from it for {seconds:.0f} s" if self.connection.silent > seconds else None

    def start(self, start: Start) -> None:
        self.connection.send({"start": asdict(start)})

    def events(self) -> list[Event]:
        """The events since the last call."""
        self.poll()
        events, self._events = self._events, []
        return events

    def end(self, dismissed: bool = False) -> None:
        """Asks the agent to kill its processes and, if `dismissed`, to end itself."""
        self.poll()
        self.ends = self.lost is None  # a lost agent isn't waited for
        self.heartbeats.clear()
        self.connection.send({"dismissed": dismissed})

    def forget_events(self) -> None:
        """Forgets the events since the last call of `events`, of processes that have ended."""
        self._events.clear()

    def poll(self) -> None:
        """Takes the agent's messages, and sends a heartbeat. Without it, each side soon counts the other as lost."""
        for message in self.connection.receive():
            if "event" in message:
                self._events.append(Event(*message["event"]))
                continue
            self.ends = False
            self.machine = Machine(**message["machine"])
            self.heartbeats = {int(rank): Heartbeat(**one) for rank, one in message["heartbeats"].items()}


def wait_for_ends(agents: Sequence[Agent]) -> None:
    """Waits until each of the agents has ended its processes, or is lost."""

    def over() -> bool:
        for agent in agents:
            agent.poll()
        return all(not agent.ends or agent.lost for agent in agents)

    until(over, _SECONDS_TO_END)
    for agent in agents:
        agent.forget_events()


class AgentPool:
    """Starts an agent on each of the nodes `names`; `agents` are in this order. The agents end with the block."""

    def __init__(self, names: Sequence[str], access: Access):
        self._access = access
        self._group = ProcessGroup(seconds_to_end=5.0)  # ssh and srun end with their agents
        self.agents = [self._started(name) for name in names]

    def _started(self, name: str) -> Agent:
        if self._access.command is None:
            return Agent(name, NodeProcesses("127.0.0.1", "lo"))
        request = {
            "head": self._access.head,
            "environment": dict(self._access.environment),
            "directory": str(Path.cwd()),
        }
        command, line = self._access.command(name), json.dumps(request).encode() + b"\n"
        process = self._group.add(Process(command, output="kept", stdin=line, signals_blocked=True))
        return Agent(name, Connection(process.read, process.write), process)

    @property
    def problems(self) -> dict[str, str]:
        """Why agents are lost or haven't connected in time, by node."""
        return {agent.name: reason for agent in self.agents if (reason := agent.lost)}

    def connect(self, give_up: Callable[[], object]) -> None:
        """Waits until each agent is connected or lost, or until `give_up()`."""
        while not give_up():
            self.poll()
            if all(agent.machine or agent.lost for agent in self.agents):
                return
            time.sleep(_POLL_SECONDS)

    def poll(self) -> None:
        """Polls each agent, which keeps its events."""
        for agent in self.agents:
            agent.poll()

    def __enter__(self) -> "AgentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the agents and their processes."""
        for agent in self.agents:
            agent.end(dismissed=True)
        wait_for_ends([agent for agent in self.agents if agent.machine])
        self._group.end(number=None)
