"""What a node does for the head: it starts processes, reports their events, and ends them once the head is gone.

On the head's own machine, that happens in the head's process. On others an agent does it. ssh or srun, which starts
the agent, writes one line to its stdin: where the head listens, the token that admits the agent, and the environment
of the user. No secret is on a command line.
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

from data_pipeline.foundation.processes import Process, ProcessGroup, caught, until
from launch import rank_wrapper
from launch.protocol import Connection, Event, Handshake, Start
from pretrain.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.hardware import (
    ACCELERATOR,
    count_gpus,
    free_port,
    network_interface_to,
    threads_per_rank,
)
from pretrain.run import heartbeat, node_memory, rank_logs, slurm, watchdog
from pretrain.run.heartbeat import Heartbeat

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
_LAST_LINES, _LONGEST = 10, 2**16  # bytes of them
_POLL_SECONDS = 0.2
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_SEE_THE_LOGS = 90.0  # NFS may show a new directory a minute late


def agent() -> int:
    """Serves one head; returns 0 if the head has ended it, 1 if the head was lost."""
    with caught() as signals:
        given = json.loads(sys.stdin.readline())
        os.environ |= given["environment"]
        os.chdir(given["directory"])
        index = given["index"] if isinstance(given["index"], int) else int(os.environ[given["index"]])
        handshake = Handshake(given["token"], index, socket.gethostname(), count_gpus(), free_port())
        connection = Connection(socket.create_connection(tuple(given["head"]), _SECONDS_TO_CONNECT))
        connection.send(asdict(handshake))
        node = NodeProcesses(network_interface_to(connection.address), f"launcher-{index}.log")
        try:
            while node.lost is None:
                for message in connection.receive():
                    node.send(message)
                for message in node.receive():
                    connection.send(message)
                if reason := connection.lost:
                    print(f"the head is lost: {reason}; ending its ranks", file=sys.stderr)
                    return 1
                if signals and node.started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            node.end()
            connection.close()
        return 0


class NodeProcesses:
    """What the head has had this node start, and what it is told and tells, as through a `Connection`.

    `started` has the programs, and the ranks of the attempt that runs. `interface` names the network interface of the
    ranks, None if gloo is to choose. The launcher's lines go to the file `log` in the directory of the logs.
    """

    address, quiet = "127.0.0.1", False

    def __init__(self, interface: str | None, log: str):
        self.started: list[RankProcesses] = []
        self.lost: str | None = None  # why nothing more is told, once the head has dismissed this node
        self._answers: list[dict[str, Any]] = []
        # by default gloo takes the address of the host's name, which is often a loopback one
        self._network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        self._log = log
        self._run: Path | None = None  # the directory of the run whose ranks it has started

    def send(self, message: dict[str, Any]) -> None:
        """Does what a message of the head asks for."""
        if "start" in message:
            asked = Start(**message["start"])
            try:
                self.started.append(self._ranks(asked) if asked.ranks else self._program(asked))
            except FileNotFoundError as error:
                self._answers.append({"event": Event("refused", lines=(str(error),))})
            return
        heartbeats = {rank: asdict(one) for rank, one in self.end().items()}
        kept = None
        if message["dismissed"]:
            self.lost = "it has ended"
            # the run's last state stays in this node's memory if it is newer than what the disk has
            kept = release_memory(self._run) if self._run and not message["run_goes_on"] else None
        self._answers.append({"ended": heartbeats, "port": free_port(), "kept": kept})

    def receive(self) -> list[dict[str, Any]]:
        """The answers and events since the last call."""
        answers, self._answers = self._answers, []
        return [*answers, *({"event": event} for processes in self.started for event in processes.events())]

    def close(self) -> None:
        pass

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        heartbeats = {rank: one for processes in self.started for rank, one in processes.end().items()}
        self.started.clear()
        return heartbeats

    def _program(self, asked: Start) -> "RankProcesses":
        return RankProcesses(asked.command, {**self._network, **os.environ, **asked.environment}, number=asked.number)

    def _ranks(self, asked: Start) -> "RankProcesses":
        """Raises FileNotFoundError if the directory of the logs isn't there."""
        logs = Path(asked.logs)
        if self._run is None:
            self._run = logs.parent.parent
            remove_left_in_memory()
        if not until(logs.is_dir, _SECONDS_TO_SEE_THE_LOGS):
            host = socket.gethostname()
            raise FileNotFoundError(
                f"run.directory: {host} doesn't see {logs}; it must be on a file system of all nodes"
            )
        environment = self._network | ranks_environment(count_gpus(), asked.local_ranks)
        environment |= {**asked.environment, rank_logs.SUPERVISED: str(logs)}
        if not asked.launcher:
            environment |= slurm.rank_environment(environment) or _ALONE
        # the wrapper is a file of this node, or of its container
        command, log = [*asked.launcher, *wrapped(asked.command)], logs / self._log
        return RankProcesses(command, environment, asked.ranks, log, run=self._run, hang_seconds=asked.hang_seconds)


def ranks_environment(gpus: int, ranks: int) -> dict[str, str]:
    """This process's environment for `ranks` on this machine, which are on the CPU if it has no `gpus`.

    Beside GPUs, the CPU has little to do unless the optimizer is offloaded; threads of all ranks on all cores would
    still be in each other's way.
    """
    threads = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return {**threads, **os.environ} if gpus else {**os.environ, **threads, ACCELERATOR: "cpu"}


def wrapped(command: list[str]) -> list[str]:
    """`command` wrapped so that its output goes to the rank's log and the supervisor learns of its end."""
    return [sys.executable, "-I", "-S", rank_wrapper.__file__, rank_logs.SUPERVISED, heartbeat.DIRECTORY, *command]


class RankProcesses:
    """Runs `command`, a launcher of `ranks` ranks or a program without any, and reports their events.

    DeepSpeed's launcher writes neither a rank's log nor its exit code: the wrappers of ranks do.

    The launcher's own lines go to `log` if the disk has room. A program's end has its `number`.
    `run` is the directory of the ranks' run. A rank whose process is stopped for `hang_seconds` hangs; all of them may
    be, so that none would say so.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        ranks: int = 0,
        log: Path | None = None,
        number: int = 0,
        run: Path | None = None,
        hang_seconds: float | None = None,
    ):
        self.ranks, self._number = ranks, number
        self._hang_seconds = hang_seconds or watchdog.LEAST_SECONDS
        self._silent: dict[int, float] | None = None  # s, of each rank when one was first seen to hang
        self._directory = node_memory.for_ranks(run)
        environment = {**environment, heartbeat.DIRECTORY: str(self._directory)}
        if run and (node := node_memory.path(run)):
            environment[node_memory.DIRECTORY] = str(node)
        self._group = ProcessGroup()
        launcher = Process(command, environment, output="kept", tied=True, signals_blocked=True)
        self._launcher = self._group.add(launcher)
        self._log, self._output = log, b""
        self._above_ranks = {self._launcher.pid}  # the processes that aren't ranks: DeepSpeed's and the wrappers
        self._wrappers: dict[int, int] = {}  # those whose ranks haven't ended, by process
        self._known: set[str] = set()  # files of outcomes
        self._done: set[int] = set()
        self._launcher_ended = self._all_ended = self._trains = False

    def events(self) -> list[Event]:
        """The events since the last call; the launcher's end comes after all its reports."""
        code = self._launcher.code
        signals = [number for process in self._above_ranks if (number := heartbeat.pending(process))]
        news = self._news()
        gone = [wrapper for wrapper in self._wrappers if not _runs(wrapper)]
        news += self._news()  # what a wrapper tells last is there before its end
        killed = [rank for wrapper in gone if (rank := self._wrappers.pop(wrapper, None)) is not None]
        # first, since other ranks end because of it
        events = [*(Event("wrapper killed", rank) for rank in killed), *news]
        self._take_output()
        heartbeats = heartbeat.read(self._directory)
        if self._silent is None:
            stopped = (rank for rank, one in heartbeats.items() if one.stopped and one.silent > self._hang_seconds)
            events += (Event("rank hung", rank) for rank in stopped)
            if any(event.kind == "rank hung" for event in events):
                # DeepSpeed's launcher will signal the others soon, which may wake the one that hangs
                self._silent = {rank: one.silent for rank, one in heartbeats.items()}
        events += (Event("signal", number) for number in signals)
        training = sum(one.first_step is not None for one in heartbeats.values())
        if not self._trains and 0 < self.ranks == training:
            self._trains = True
            events.append(Event("training"))
        if code is not None and not self._launcher_ended:
            self._launcher_ended = True
            words = [line for line in self._output.decode(errors="replace").splitlines() if line]
            events.append(Event("launcher ended", self._number, code, tuple(words[-_LAST_LINES:])))
        if self._launcher_ended and not self._all_ended and not self._launcher.session_alive:
            self._all_ended = True
            events.append(Event("all ended"))
        return events

    def _news(self) -> list[Event]:
        """What ranks and wrappers have told since the last call."""
        return [event for told in heartbeat.messages(self._directory, self._known) if (event := self._event(told))]

    def _event(self, told: heartbeat.Message) -> Event | None:
        rank, kind, text = told
        if kind == "done":
            self._done.add(rank)
        elif kind == rank_wrapper.STARTED:
            parent, wrapper = map(int, text.split())
            self._above_ranks |= {parent, wrapper}
            self._wrappers[wrapper] = rank
        elif kind == rank_wrapper.ENDED:
            wrapper, code = map(int, text.split())
            self._above_ranks.discard(wrapper)
            self._wrappers.pop(wrapper, None)
            # read here, since other hosts may see the log's end late
            words = rank_logs.last_lines(rank_logs.rank_log(self._log.parent, rank)) if code and self._log else []
            return Event("rank ended" if code or rank in self._done else "rank left", rank, code, tuple(words))
        elif kind == "faulty":
            return Event("rank faulty", int(text))
        elif kind == "hung":
            return Event("rank hung", rank)
        else:
            return Event("rank failed", rank, lines=(text,))
        return None

    def _take_output(self) -> None:
        """What the launcher has printed since the last call goes to the log if the disk has room."""
        if printed := self._launcher.read():
            self._output = (self._output + printed)[-_LONGEST:]
            if self._log:
                with contextlib.suppress(OSError), self._log.open("ab") as log:
                    log.write(printed)

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        last, silent = {**self._without_heartbeat(), **heartbeat.read(self._directory)}, self._silent or {}
        self._group.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        return {rank: replace(one, silent=max(one.silent, silent.get(rank, 0.0))) for rank, one in last.items()}

    def _without_heartbeat(self) -> dict[int, Heartbeat]:
        """The ranks that run: what is shown for those that had no heartbeat yet, silent since they were started."""
        silent = time.monotonic() - self._launcher.started
        return {
            rank: Heartbeat(0, 0, silent, silent, None, _below_is_stopped(wrapper))
            for wrapper, rank in self._wrappers.items()
        }


def _runs(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def _below_is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(child.status() == psutil.STATUS_STOPPED for child in psutil.Process(process).children())
    return False
