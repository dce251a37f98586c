"""The head's side of its agents: starts them, admits those that have the token, and reads their reports.

On the head's own machine its process does itself what an agent does elsewhere.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.processes import Process, ProcessGroup, until
from launch.agent import NodeProcesses
from launch.protocol import Connection, Event, Handshake, Start, handshake
from pretrain.hardware import count_gpus, free_port
from pretrain.run.heartbeat import Heartbeat

_SECONDS_TO_CONNECT, _SECONDS_TO_END, _POLL_SECONDS = 300.0, 90.0, 0.1
_UNKNOWN = 64  # connections without the token, beside those of agents; of more, the oldest are closed
_LINES_OF_ERRORS = 3


class Agent:
    """One agent, with the `ranks` of its node once they have been started, and their last `heartbeats` once they have
    been ended."""

    def __init__(self, connection: Connection | NodeProcesses, handshake: Handshake, name: str):
        self.name, self.handshake, self.ranks = name, handshake, 0
        self.heartbeats: dict[int, Heartbeat] = {}
        self.connection, self._ends = connection, False  # whether it was asked to end its processes
        self._events: list[Event] = []

    def start(self, asked: Start) -> None:
        self.ranks = asked.ranks
        self.connection.send({"start": asdict(asked)})

    def events(self) -> list[Event]:
        """The events since the last call."""
        self._receive()
        events, self._events = self._events, []
        return events

    def end(self, dismissed: bool = False, run_goes_on: bool = True) -> None:
        """Asks it to kill all that it has started, and if it is `dismissed` to end itself.

        If the run goes on, its state stays in the node's memory.
        """
        self.heartbeats.clear()
        if self.connection.lost is None:
            self._ends = True
            self.connection.send({"dismissed": dismissed, "run_goes_on": run_goes_on})

    def wait(self) -> None:
        """Waits until it has done so, or the node is lost."""

        def over() -> bool:
            self._receive()
            return not self._ends or self.connection.lost is not None

        until(over, _SECONDS_TO_END)
        self._events.clear()

    def _receive(self) -> None:
        for message in self.connection.receive():
            if "event" in message:
                event = Event(*message["event"])
                self._events.append(event._replace(lines=tuple(event.lines)))
            else:
                self._ends = False
                self.heartbeats = {int(rank): Heartbeat(**one) for rank, one in message["ended"].items()}
                self.handshake = replace(self.handshake, port=message["port"])
                if message["kept"]:
                    where = f"{self.handshake.host}: " if self.handshake.host else ""
                    print(f"{where}{message['kept']}", file=sys.stderr, flush=True)


class AgentPool:
    """Starts one agent for each of `names` and waits for them. What it has started ends with the block.

    `agents` maps the numbers of those that have connected, which follow the order of the names. `problems` maps the
    names of those that can't be started, or haven't connected in time, to the reason.
    """

    def __init__(self, names: list[str], address: str):
        self.agents: dict[int, Agent] = {}
        self.problems: dict[str, str] = {}
        self._names = names
        self._token = secrets.token_hex(16)
        self._address = address
        self._server: socket.socket | None = None
        self._unknown: list[socket.socket] = []  # connections that have not shown the token, the oldest first
        self._group = ProcessGroup(seconds_to_end=5.0)  # ssh and srun end by themselves once their agents have gone
        self._starters: list[tuple[Process, list[str]]] = []

    def start_here(self) -> None:
        """Has this process do what the only agent would. Its ranks meet on the loopback interface."""
        shown = Handshake("", 0, "", count_gpus(), free_port())
        self.agents[0] = Agent(NodeProcesses("lo", "launcher.log"), shown, self._names[0])

    def start(self, command: list[str], names: list[str], index: int | str, environment: dict[str, str]) -> None:
        """Runs `command`, ssh or srun, which starts the agents `names`.

        Each has the number `index`, or that of the variable of this name in its environment. No secret is on a command
        line: stdin carries the token and the `environment`.
        """
        if self._server is None:
            self._server = socket.create_server((self._address, 0), backlog=len(self._names) + 16)
            self._server.setblocking(False)
        given = {
            "head": self._server.getsockname()[:2],
            "token": self._token,
            "index": index,
            "environment": environment,
            "directory": os.getcwd(),  # noqa: PTH109
        }
        line = json.dumps(given).encode() + b"\n"
        starter = Process(command, output="kept", stdin=line, signals_blocked=True)
        self._starters.append((self._group.add(starter), names))

    def connect(self, give_up: Callable[[], object], seconds: float = _SECONDS_TO_CONNECT) -> None:
        """Waits until each agent has connected or has a problem, or until `give_up`."""
        deadline = time.monotonic() + seconds
        while (missing := self._missing()) and not give_up():
            assert self._server is not None
            self._accept(self._server)
            self._unknown = [connected for connected in self._unknown if not self._known(connected)]
            for agent in self.agents.values():
                agent.events()  # sends heartbeats, so that no agent takes its head for lost
            for process, names in self._starters:
                if process.code is not None:
                    said = "; ".join(process.last_lines(_LINES_OF_ERRORS)) or "it said nothing"
                    reason = f"{process.program} ended with exit code {process.code}: {said}"
                    self.problems |= dict.fromkeys(names, reason)
            if time.monotonic() > deadline:
                self.problems |= dict.fromkeys(missing, f"no agent has connected from it within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _missing(self) -> list[str]:
        without = (name for index, name in enumerate(self._names) if index not in self.agents)
        return [name for name in without if name not in self.problems]

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connected, _ = server.accept()
                connected.setblocking(False)
                self._unknown.append(connected)
                if len(self._unknown) > len(self._names) + _UNKNOWN:
                    self._unknown.pop(0).close()

    def _known(self, connected: socket.socket) -> bool:
        """Whether it is known what a connection is: an agent, which is admitted, or anything else, which is closed."""
        try:
            shown = handshake(connected, self._token)
            if shown is None:
                return False
            if not 0 <= shown.index < len(self._names):
                raise FailedError("no agent of this number")
            self.agents[shown.index] = Agent(Connection(connected), shown, self._names[shown.index])
        except FailedError:
            connected.close()
        return True

    def __enter__(self) -> "AgentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, run_goes_on: bool = False) -> None:
        """Ends the agents, and with them what they have started."""
        for agent in self.agents.values():
            agent.end(dismissed=True, run_goes_on=run_goes_on)
        for agent in self.agents.values():
            agent.wait()
            agent.connection.close()
        self._group.end(number=None)
        for connected in (*self._unknown, *([self._server] if self._server else [])):
            connected.close()
