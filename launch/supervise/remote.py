"""The head's side of its agents: starts them, admits those that have the token, and reads their reports."""

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from data_pipeline.foundation.blocked_signals import blocked
from data_pipeline.foundation.errors import FailedError
from launch.supervise.events import Event
from launch.supervise.wire import Wire
from pretrain.run.stop_signals import STOP_SIGNALS

_SECONDS_TO_JOIN, _SECONDS_TO_END, _SECONDS_BETWEEN_LOOKS = 300.0, 90.0, 0.1
_LINES_OF_ERRORS = 3


@dataclass
class Hello:
    """What an agent says of its node: GPUs that it may use, a port that is free there."""

    index: int
    host: str
    gpus: int
    port: int


class Agent:
    """One agent; the `Part` of an attempt that is on its node, once `start` has been called."""

    def __init__(self, wire: Wire, hello: Hello, name: str):
        self.name, self.hello, self.ranks = name, hello, 0
        self._wire = wire

    @property
    def address(self) -> str:
        return self._wire.address

    def start(self, ranks: int, message: dict[str, Any]) -> None:
        self.ranks = ranks
        self._wire.send({**message, "ranks": ranks, "index": self.hello.index})

    def events(self) -> list[Event]:
        events = (Event(*message["event"]) for message in self._wire.receive())
        return [event._replace(lines=tuple(event.lines)) for event in events]

    def lost(self) -> str | None:
        return self._wire.lost

    def quiet(self) -> bool:
        return self._wire.quiet

    def end(self) -> None:
        if self.lost() is None:
            self._wire.send({"end": True})

    def wait(self) -> None:
        patience = time.monotonic() + _SECONDS_TO_END
        while self._wire.lost is None and time.monotonic() < patience:
            self._wire.receive()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._wire.close()


class Agents:
    """Starts agents and waits for them. What it has started ends with the block."""

    def __init__(self, names: list[str], address: str):
        self._names = names
        self._token = secrets.token_hex(16)
        self._server = socket.create_server((address, 0), backlog=len(names) + 16)
        self._server.setblocking(False)
        self._started: list[_Starter] = []
        self._joined: dict[int, Agent] = {}

    def run(self, command: list[str], name: str, index: int | str, environment: dict[str, str]) -> None:
        """Runs `command`, which starts agents; each has the number `index`, or that of the variable of this name."""
        given = {
            "head": self._server.getsockname()[:2],
            "token": self._token,
            "index": index,
            "environment": environment,
            "directory": os.getcwd(),  # noqa: PTH109
        }
        self._started.append(_Starter(command, name, json.dumps(given).encode() + b"\n"))

    def joined(self, give_up: Callable[[], bool]) -> list[Agent]:
        """All agents in the order of their numbers, once they have connected.

        Raises FailedError if one of them can't be started, or doesn't connect, with a line for each.
        """
        patience = time.monotonic() + _SECONDS_TO_JOIN
        strangers: list[Wire] = []
        while len(self._joined) < len(self._names) and not give_up():
            with contextlib.suppress(BlockingIOError):
                strangers.append(Wire(self._server.accept()[0]))
            strangers = [wire for wire in strangers if not self._admitted(wire)]
            for agent in self._joined.values():
                agent.events()  # so that none thinks it has lost its head
            if problems := [problem for starter in self._started if (problem := starter.problem())]:
                raise FailedError("\n".join(problems))
            if time.monotonic() > patience:
                absent = [name for index, name in enumerate(self._names) if index not in self._joined]
                raise FailedError(f"no agent has connected from {', '.join(absent)} within {_SECONDS_TO_JOIN:.0f} s")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return [agent for _, agent in sorted(self._joined.items())]

    def _admitted(self, wire: Wire) -> bool:
        """Admits a connection that shows the token; returns whether it needs no more attention."""
        for message in wire.receive():
            token, index = str(message.pop("token", "")), message.get("index", -1)
            if hmac.compare_digest(token, self._token) and 0 <= index < len(self._names):
                self._joined[index] = Agent(wire, Hello(**message), self._names[index])
                return True
            wire.close()
        return wire.lost is not None

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for agent in self._joined.values():
            agent.end()
        for starter in self._started:
            starter.end()
        self._server.close()


class _Starter:
    """ssh or srun: started with signals blocked and in a session of its own, so that Ctrl-C doesn't reach it."""

    def __init__(self, command: list[str], name: str, stdin: bytes):
        self._name, self._program = name, command[0]
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        with blocked(STOP_SIGNALS):
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._output, start_new_session=True
            )
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self._process.stdin.write(stdin)
            self._process.stdin.flush()

    def problem(self) -> str | None:
        """What went wrong if it has ended."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.seek(0)
        lines = [line for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        said = "; ".join(lines[-_LINES_OF_ERRORS:]) or "it said nothing"
        return f"{self._name}: {self._program} ended with exit code {code}: {said}"

    def end(self) -> None:
        """Lets it end by itself for a moment, as it does once its agents have gone; then kills it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._output.close()
