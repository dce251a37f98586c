"""The agent of a node: starts processes for the head, reports their events, and ends them when the head is gone.

On the head's own machine, the head's process does this itself. On other nodes, ssh or srun starts an agent. The first
line of the agent's stdin has the user's environment, so that no secret is on a command line.
"""

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import psutil

from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import Process, ProcessGroup, caught
from launch.protocol import TIMEOUT_SECONDS, Connection, Event, Machine, Start
from pretrain.hardware import ACCELERATOR, count_gpus, free_port, threads_per_rank
from pretrain.run import heartbeat, rank_logs, watchdog
from pretrain.run.heartbeat import Heartbeat, Message

_LAST_LINES = 10
_POLL_SECONDS = 0.2
_SIGNAL, _NOT_STARTED = 128, 127  # exit codes of shells: the first is added to the number of a signal
_SECONDS_TO_SEE_THE_LOGS = 90.0  # NFS may show a new directory a minute late


def agent() -> int:
    """Serves one head; returns 0 if the head has ended it, 1 if the head was lost."""
    with caught() as signals:
        with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
            request = json.loads(stdin.readline())  # and not a byte more
        os.environ |= request["environment"]
        os.chdir(request["directory"])
        address = address_towards(request["head"] or os.environ["SSH_CONNECTION"].split()[0])
        node = NodeProcesses(address, interface_of(address))
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        connection = Connection(_arrived, lambda message: os.write(1, message))
        try:
            while not node.dismissed:
                messages = connection.receive()
                if connection.closed or connection.silent > TIMEOUT_SECONDS:
                    return 1
                for message in messages:
                    node.send(message)  # to end ranks may take longer than the time limit of messages
                for message in node.receive():
                    connection.send(message)
                if signals and node.started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            node.end()
        return 0


def _arrived() -> bytes:
    """The bytes that have arrived on stdin; b"" if there are none. Raises EOFError at the end of stdin."""
    with contextlib.suppress(BlockingIOError):
        if received := os.read(0, 2**20):
            return received
        raise EOFError
    return b""


def address_towards(host: str) -> str:
    """The local address that routes to `host`. Raises UserError if the name doesn't resolve."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{host}: can't be reached: {error.strerror}") from None


class NodeProcesses:
    """The processes that the head has started on this node, which has the `address` and the network `interface`.

    Has the interface of a `Connection`, for the head's own machine. `interface`: None: gloo chooses.

    Attributes:
        started: the programs, and the ranks of the running attempt.
    """

    silent, quiet, other_lines = 0.0, False, ()

    def __init__(self, address: str, interface: str | None):
        self.started: list[Ranks | Program] = []
        self.dismissed = False
        # by default gloo resolves the host's name, often to a loopback address
        self._network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        self._machine = Machine(address, count_gpus(), 0)
        self._waiting: Start | None = None  # ranks that wait for the directory of their logs
        self._since = 0.0
        self._answers = [self._idle({})]

    def send(self, message: dict[str, Any]) -> None:
        """Does what a message of the head asks for."""
        if "start" in message:
            request = Start(**message["start"])
            if request.ranks:
                self._waiting, self._since = request, time.monotonic()
            else:
                self.started.append(Program(request, {**self._network, **os.environ, **request.environment}))
            return
        self._answers.append(self._idle(self.end()))
        self.dismissed = message["dismissed"]

    def receive(self) -> list[dict[str, Any]]:
        """The answers and events since the last call."""
        if self._waiting:
            self._start_ranks(self._waiting)
        answers, self._answers = self._answers, []
        return [*answers, *({"event": event} for processes in self.started for event in processes.events())]

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        heartbeats = {rank: one for processes in self.started for rank, one in processes.end().items()}
        self.started.clear()
        self._waiting = None
        return heartbeats

    def _idle(self, heartbeats: dict[int, Heartbeat]) -> dict[str, Any]:
        """The answer that nothing runs here."""
        last = {rank: asdict(one) for rank, one in heartbeats.items()}
        return {"machine": asdict(replace(self._machine, port=free_port())), "heartbeats": last}

    def _start_ranks(self, request: Start) -> None:
        """Starts ranks once this node sees the directory of their logs."""
        logs = Path(request.logs)
        if logs.is_dir():
            environment = self._network | ranks_environment(self._machine.gpus, len(request.ranks))
            self.started.append(Ranks(request, environment | request.environment))
            self._waiting = None
        elif time.monotonic() - self._since > _SECONDS_TO_SEE_THE_LOGS:
            reason = f"{socket.gethostname()} doesn't see {logs}; it must be on a file system of all nodes"
            self._answers.append({"event": Event("refused", lines=[f"run.directory: {reason}"])})
            self._waiting = None


def is_loopback(address: str) -> bool:
    """Whether only this machine is reached at an IP address, which may have a scope: fe80::1%eth0."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The network interface with a local address; None for a loopback address."""
    interfaces = psutil.net_if_addrs().items() if not is_loopback(address) else ()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)


def ranks_environment(gpus: int, ranks: int) -> dict[str, str]:
    """The environment of `ranks` ranks on this machine; without `gpus` they run on the CPU.

    The ranks share the cores, so that their threads don't compete.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return {**defaults, **os.environ, **({} if gpus else {ACCELERATOR: "cpu"})}


class Program:
    """Runs a program, and reports its end with the last lines that it printed."""

    def __init__(self, request: Start, environment: Mapping[str, str]):
        self._number, self._group, self._reported = request.number, ProcessGroup(), False
        process = Process(request.command, environment, output="kept", tied=True, signals_blocked=True)
        self._process = self._group.add(process)

    def events(self) -> list[Event]:
        """The event of its end, once."""
        if self._reported or (code := self._process.code) is None:
            return []
        self._reported = True
        return [Event("program ended", self._number, code, self._process.last_lines(_LAST_LINES))]

    def end(self) -> dict[int, Heartbeat]:
        self._group.kill()
        return {}


class Ranks:
    """Runs the ranks of this node, and reports their events.

    Each rank has the variables that DeepSpeed's launcher would set, except that CUDA_VISIBLE_DEVICES stays as it is.
    """

    def __init__(self, request: Start, environment: Mapping[str, str]):
        self._request, self._logs = request, Path(request.logs)
        self._directory = heartbeat.new_directory()
        own = {rank_logs.SUPERVISED: request.logs, heartbeat.DIRECTORY: str(self._directory)}
        self._group = ProcessGroup()
        self._processes: dict[int, Process] = {}
        self._ends: list[Message] = []  # added by threads
        self._over: set[int] = set()  # ranks whose end has been reported
        self._known: set[str] = set()  # files of messages that were read
        self._done: set[int] = set()
        self._at_hang: dict[int, Heartbeat] = {}  # of all ranks, when one was first seen to hang
        for local, rank in enumerate(request.ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_SIZE": str(len(request.ranks))}
            self._start(rank, {**environment, **own, **place})

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        with _appended(rank_logs.rank_log(self._logs, rank)) as output:
            try:
                process = Process(self._request.command, environment, output, tied=True, signals_blocked=True)
            except OSError as error:
                with contextlib.suppress(OSError):
                    output.write(f"error: {error.filename or self._request.command[0]}: {error.strerror}\n".encode())
                self._ends.append(Message(rank, "ended", str(_NOT_STARTED), time.time_ns()))
                return
        self._processes[rank] = self._group.add(process)
        threading.Thread(target=self._wait, args=(rank, process), name=f"end of rank {rank}", daemon=True).start()

    def _wait(self, rank: int, process: Process) -> None:
        """Notes when a rank ends, so that a late call of `events` still finds the order of several ends."""
        code = process.wait()
        self._ends.append(Message(rank, "ended", str(code), time.time_ns()))

    def events(self) -> list[Event]:
        """The events since the last call, in the order of time."""
        ends = [end for end in tuple(self._ends) if end.rank not in self._over]
        # after `ends`: a rank's last message is before its end
        messages = heartbeat.messages(self._directory, self._known)
        events = [
            event
            for message in sorted([*messages, *ends], key=lambda one: one.when)
            if (event := self._event(message)) is not None
        ]
        heartbeats = heartbeat.read(self._directory)
        if not self._at_hang:
            # if all ranks are stopped (SIGSTOP), no rank reports that it hangs
            limit = self._request.hang_seconds or watchdog.LEAST_SECONDS
            stopped = (rank for rank, one in heartbeats.items() if one.stopped and one.silent > limit)
            events += (Event("hung", rank) for rank in stopped)
            if any(event.kind == "hung" for event in events):
                self._at_hang = heartbeats
        return events

    def _event(self, message: Message) -> Event | None:
        rank, kind, text, _ = message
        if kind == "done":
            self._done.add(rank)
            return None
        if kind == "ended":
            return self._ended(rank, int(text))
        if kind == "faulty":
            return Event("faulty", int(text))
        return Event("hung" if kind == "hung" else "failed", rank, lines=[text])

    def _ended(self, rank: int, code: int) -> Event:
        self._over.add(rank)
        log = rank_logs.rank_log(self._logs, rank)
        with contextlib.suppress(OSError):  # the disk may be full; nothing reads this file but people
            log.with_suffix(".exit").write_text(f"{code if code >= 0 else _SIGNAL - code}\n")
        # read here, since other hosts may see the log's end late
        words = rank_logs.last_lines(log) if code else []
        # without the directory, which something has removed, no rank can tell that it is done
        left = not code and rank not in self._done and self._directory.is_dir()
        return Event("left" if left else "ended", rank, code, words)

    def end(self) -> dict[int, Heartbeat]:
        """Ends all ranks; returns their last heartbeats, with silence and marks as of the time when one first hung."""
        last = {**self._without_heartbeat(), **heartbeat.read(self._directory)}
        self._group.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        # since then, ranks may have ended, and the hung rank may have continued
        seen = {rank: self._at_hang.get(rank, one) for rank, one in last.items()}
        return {rank: replace(one, silent=seen[rank].silent, marks=seen[rank].marks) for rank, one in last.items()}

    def _without_heartbeat(self) -> dict[int, Heartbeat]:
        """A heartbeat for each running rank, silent since its start, for ranks that haven't had one yet."""
        found = {}
        for rank, process in self._processes.items():
            if rank not in self._over:
                silent = time.monotonic() - process.started
                found[rank] = Heartbeat(0, 0, silent, None, heartbeat.is_stopped(process.pid))
        return found


def _appended(log: Path) -> IO[bytes]:
    """`log`, opened for appending; /dev/null if that fails, since a run continues on a full disk."""
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)
