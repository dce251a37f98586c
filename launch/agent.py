"""The agent of a node: it starts processes for the head, reports their events, and ends them when the head is gone.

On the head's own machine, the head's process does this itself. On other nodes ssh or srun starts an agent. The first
line of the agent's stdin has the user's environment, so that no secret is on a command line.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.processes import Process, ProcessGroup, caught
from launch import rank_wrapper
from launch.protocol import TIMEOUT_SECONDS, Connection, Event, Machine, Start
from pretrain.engine.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.hardware import ACCELERATOR, count_gpus, free_port, threads_per_rank
from pretrain.run import heartbeat, node_memory, rank_logs, status, watchdog
from pretrain.run.heartbeat import Heartbeat

_LAST_LINES = 10
_POLL_SECONDS = 0.2
_SECONDS_TO_SEE_THE_LOGS = 90.0  # NFS may show a new directory a minute late
_WAITS, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # how threads of libgomp wait; the second comes before the first
_SPIN_COUNT = "1000"  # turns of libgomp's loop: docs/results/operations.md compares it with others


def agent() -> int:
    """Serves one head; returns 0 if the head has ended it, 1 if the head was lost."""
    with caught() as signals:
        with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
            given = json.loads(stdin.readline())  # and not a byte more
        os.environ |= given["environment"]
        os.chdir(given["directory"])
        head = given["head"] or os.environ["SSH_CONNECTION"].split()[0]
        node = NodeProcesses(address_towards(head), network_interface_to(head), f"launcher-{given['number']}.log")
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        connection = Connection(_arrived, lambda message: os.write(1, message))
        try:
            while not node.dismissed:
                for message in connection.receive():
                    node.send(message)
                for message in node.receive():
                    connection.send(message)
                if connection.closed or connection.silent > TIMEOUT_SECONDS:
                    return 1
                if signals and node.started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            node.end()
        return 0


def _arrived() -> bytes:
    """What has arrived on stdin. Raises EOFError at its end."""
    with contextlib.suppress(BlockingIOError):
        if received := os.read(0, 2**20):
            return received
        raise EOFError
    return b""


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Raises UserError if the name doesn't resolve."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{host}: can't be reached: {error.strerror}") from None


class NodeProcesses:
    """The processes that the head has started on this node. The head sends and receives messages as through a
    `Connection`.

    Attributes:
        started: the programs, and the ranks of the running attempt.
        address: the node's address.
        interface: the network interface of the ranks; None: gloo chooses.
        log: the file in the directory of the logs that gets the launcher's lines.
    """

    silent, quiet, said = 0.0, False, ()

    def __init__(self, address: str, interface: str | None, log: str):
        self.started: list[RankProcesses] = []
        self.dismissed = False
        # by default gloo takes the address of the host's name, which is often a loopback one
        self._network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        self._log = log
        self._machine = Machine(address, count_gpus(), 0)
        self._run: Path | None = None  # the directory of the run whose ranks it has started
        self._waiting: Start | None = None  # for the directory of the logs
        self._since = 0.0
        self._answers = [self._idle({})]

    def send(self, message: dict[str, Any]) -> None:
        """Does what a message of the head asks for."""
        if "start" in message:
            asked = Start(**message["start"])
            if asked.ranks:
                self._waiting, self._since = asked, time.monotonic()
            else:
                self.started.append(RankProcesses(asked, {**self._network, **os.environ, **asked.environment}))
            return
        heartbeats, kept = self.end(), None
        if message["dismissed"]:
            self.dismissed = True
            # the run's last state stays in this node's memory if it is newer than what the disk has
            kept = release_memory(self._run) if self._run and not message["run_goes_on"] else None
        self._answers.append(self._idle(heartbeats, kept))

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

    def _idle(self, heartbeats: dict[int, Heartbeat], kept: str | None = None) -> dict[str, Any]:
        """The answer that nothing runs here. `kept`: what is said of the run's last state in this node's memory."""
        last = {rank: asdict(one) for rank, one in heartbeats.items()}
        return {"machine": asdict(replace(self._machine, port=free_port())), "heartbeats": last, "kept": kept}

    def _start_ranks(self, asked: Start) -> None:
        """Starts ranks once this node sees the directory of their logs."""
        logs = Path(asked.logs)
        if logs.is_dir():
            if self._run is None:
                self._run = logs.parent.parent
                remove_left_in_memory()
            environment = self._network | ranks_environment(self._machine.gpus, asked.ranks)
            environment |= {**asked.environment, rank_logs.SUPERVISED: asked.logs}
            self.started.append(RankProcesses(asked, environment, logs / self._log, self._run))
            self._waiting = None
        elif time.monotonic() - self._since > _SECONDS_TO_SEE_THE_LOGS:
            reason = f"{socket.gethostname()} doesn't see {logs}; it must be on a file system of all nodes"
            self._answers.append({"event": Event("refused", lines=[f"run.directory: {reason}"])})
            self._waiting = None


def network_interface_to(address: str) -> str | None:
    """The network interface of this machine on the way to `address`; None for a loopback one or none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if not own.startswith("127.") and any(one.address == own for one in addresses):
                return str(name)
    return None


def ranks_environment(gpus: int, ranks: int) -> dict[str, str]:
    """This process's environment for `ranks` on this machine, which are on the CPU if it has no `gpus`.

    Beside GPUs, the CPU has little to do unless the optimizer is offloaded; threads of all ranks on all cores would
    still be in each other's way. On the CPU, a thread that waits for the others spins for a moment only, unless the
    user says how threads wait: spinning takes the cores from other programs, and from the threads waited for.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    if not gpus and not os.environ.keys() & {_WAITS, _SPINS}:
        defaults[_SPINS] = _SPIN_COUNT
    return {**defaults, **os.environ, **({} if gpus else {ACCELERATOR: "cpu"})}


def wrapped(command: list[str]) -> list[str]:
    """`command` wrapped so that its output goes to the rank's log and the supervisor learns of its end."""
    return [sys.executable, "-I", "-S", rank_wrapper.__file__, rank_logs.SUPERVISED, heartbeat.DIRECTORY, *command]


class RankProcesses:
    """Runs a launcher of ranks, or a program, and reports their events.

    DeepSpeed's launcher writes neither a rank's log nor its exit code; the wrappers of the ranks do. The launcher's own
    lines go to `log` if the disk has room. `run` is the run directory of the ranks.
    """

    def __init__(self, asked: Start, environment: Mapping[str, str], log: Path | None = None, run: Path | None = None):
        self._asked, self._log, self._run = asked, log, run
        self._directory = node_memory.for_ranks(run)
        environment = {**environment, heartbeat.DIRECTORY: str(self._directory)}
        if run and (node := node_memory.path(run)):
            environment[node_memory.DIRECTORY] = str(node)
        # the wrapper is a file of this node, or of its container
        command = [*asked.launcher, *wrapped(asked.command)] if asked.launcher else asked.command
        self._group = ProcessGroup()
        launcher = Process(command, environment, output="kept", tied=True, signals_blocked=True)
        self._launcher = self._group.add(launcher)
        self._wrappers: dict[int, int] = {}  # processes, by rank
        self._over: set[int] = set()  # the ranks that have ended, or whose end nobody will see
        self._known: set[str] = set()  # files of messages
        self._done: set[int] = set()
        self._at_hang: dict[int, Heartbeat] = {}  # of all ranks, when one was first seen to hang
        self._launcher_ended = False

    def events(self) -> list[Event]:
        """The events since the last call."""
        code = self._launcher.code
        gone = {rank for rank, wrapper in self._running() if not _runs(wrapper)}
        told = heartbeat.messages(self._directory, self._known)  # what a wrapper tells last is there before its end
        events = [event for message in told if (event := self._event(message))]
        # first, since other ranks end because of it
        events = [Event("wrapper killed", rank) for rank in gone - self._over] + events
        self._over |= gone
        heartbeats = heartbeat.read(self._directory)
        if not self._at_hang:
            # all of them may be stopped, so that none would say that it hangs
            limit = self._asked.hang_seconds or watchdog.LEAST_SECONDS
            stopped = (rank for rank, one in heartbeats.items() if one.stopped and one.silent > limit)
            events += (Event("hung", rank) for rank in stopped)
            if any(event.kind == "hung" for event in events):
                self._at_hang = heartbeats
        self._take_output()
        if code is not None and not self._launcher_ended and self._ended_early():
            self._launcher_ended = True
            words = self._launcher.last_lines(_LAST_LINES)
            events.append(Event("launcher ended", self._asked.number, code, words))
        return events

    def _event(self, told: heartbeat.Message) -> Event | None:
        rank, kind, text = told
        if kind == "done":
            self._done.add(rank)
        elif kind == rank_wrapper.STARTED:
            self._wrappers[rank] = int(text)
        elif kind == rank_wrapper.ENDED:
            code = int(text)
            self._over.add(rank)
            # read here, since other hosts may see the log's end late
            words = rank_logs.last_lines(rank_logs.rank_log(self._log.parent, rank)) if code and self._log else []
            return Event("ended" if code or rank in self._done else "left", rank, code, words)
        elif kind == "faulty":
            return Event("faulty", int(text))
        else:
            return Event("hung" if kind == "hung" else "failed", rank, lines=[text])
        return None

    def _running(self) -> list[tuple[int, int]]:
        """The ranks that haven't ended, each with its wrapper."""
        return [(rank, wrapper) for rank, wrapper in self._wrappers.items() if rank not in self._over]

    def _ended_early(self) -> bool:
        """Whether the launcher, which has ended, has left ranks behind. They may be saving if they were asked to stop.

        A program has no ranks, and always counts.
        """
        if self._asked.ranks and len(self._over) == self._asked.ranks:
            return False
        return not (self._run and status.stop_requested(self._run) and self._launcher.session_alive)

    def _take_output(self) -> None:
        """What the launcher has printed since the last call goes to the log if the disk has room."""
        if self._log and (printed := self._launcher.read()):
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                log.write(printed)

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        last = {**self._without_heartbeat(), **heartbeat.read(self._directory)}
        self._group.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        # DeepSpeed's launcher signals the others when one has ended, which may wake the one that hangs
        silent = {rank: one.silent for rank, one in self._at_hang.items()}
        return {rank: replace(one, silent=max(one.silent, silent.get(rank, 0.0))) for rank, one in last.items()}

    def _without_heartbeat(self) -> dict[int, Heartbeat]:
        """The ranks that run: what is shown for those that had no heartbeat yet, silent since they were started."""
        silent = time.monotonic() - self._launcher.started
        return {
            rank: Heartbeat(0, 0, silent, silent, None, _below_is_stopped(wrapper)) for rank, wrapper in self._running()
        }


def _runs(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def _below_is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(child.status() == psutil.STATUS_STOPPED for child in psutil.Process(process).children())
    return False
