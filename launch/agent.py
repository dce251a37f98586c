"""What a node does for the head: it starts processes, reports their events, and ends them once the head is gone.

On the head's own machine, that happens in the head's process. On others an agent does it. ssh or srun, which starts
the agent, writes one line to its stdin: where the head listens, the token that admits the agent, and the environment
of the user. No secret is on a command line.
"""

import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.foundation.processes import caught, until
from launch.protocol import Connection, Event, Handshake, Start
from launch.rank_processes import RankProcesses, wrapped
from pretrain.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.hardware import (
    ACCELERATOR,
    count_gpus,
    free_port,
    network_interface_to,
    threads_per_rank,
)
from pretrain.run import rank_logs, slurm
from pretrain.run.heartbeat import Heartbeat

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
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
        heartbeats = {rank: asdict(heartbeat) for rank, heartbeat in self.end().items()}
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

    def _program(self, asked: Start) -> RankProcesses:
        return RankProcesses(asked.command, {**self._network, **os.environ, **asked.environment}, number=asked.number)

    def _ranks(self, asked: Start) -> RankProcesses:
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
