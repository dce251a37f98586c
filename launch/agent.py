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
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.foundation.processes import caught
from launch.protocol import Connection, Event, Handshake, Start
from launch.rank_processes import RankProcesses, wrapped
from pretrain.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.hardware.machine import (
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
        node = NodeProcesses(lambda: network_interface_to(connection.address), f"launcher-{index}.log")
        try:
            while True:
                for message in connection.receive():
                    for answer in node.obey(message):
                        connection.send(answer)
                if node.ended:
                    return 0
                if reason := connection.lost:
                    print(f"the head is lost: {reason}; ending its ranks", file=sys.stderr)
                    return 1
                for event in node.events():
                    connection.send({"event": event})
                if signals and node.started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            node.end()
            connection.close()


class NodeProcesses:
    """What the head has had this node start. `started` has the programs, and the ranks of the attempt that runs.

    `interface` names the network interface of the ranks, None if gloo is to choose. The launcher's lines go to the file
    `log` in the directory of the logs. `ended`: the head has asked to end.
    """

    def __init__(self, interface: Callable[[], str | None], log: str):
        self.started: list[RankProcesses] = []
        self.ended = False
        self._interface, self._log = interface, log
        self._run: Path | None = None  # the directory of the run whose ranks it has started

    def obey(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Does what a message asks for; returns the answer."""
        if "start" in message:
            asked = Start(**message["start"])
            try:
                self.started.append(self._ranks(asked) if asked.ranks else self._program(asked))
            except FileNotFoundError as error:
                return [{"event": Event("refused", lines=(str(error),))}]
        elif "end_ranks" in message:
            shown = {rank: asdict(heartbeat) for rank, heartbeat in self.end().items()}
            return [{"ended": shown, "port": free_port()}]
        elif "end" in message:
            self.end()
            self.ended = True
            # the run's last state stays in this node's memory if it is newer than what the disk has
            if self._run and not message["run_goes_on"] and (kept := release_memory(self._run)):
                return [{"kept": kept}]
        return []

    def events(self) -> list[Event]:
        """The events since the last call."""
        return [event for processes in self.started for event in processes.events()]

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        heartbeats: dict[int, Heartbeat] = {}
        for processes in self.started:
            processes.end()
            heartbeats |= processes.heartbeats
        self.started.clear()
        return heartbeats

    def _program(self, asked: Start) -> RankProcesses:
        return RankProcesses(asked.command, {**self._network(), **os.environ, **asked.environment}, number=asked.number)

    def _ranks(self, asked: Start) -> RankProcesses:
        """Raises FileNotFoundError if the directory of the logs isn't there."""
        logs = Path(asked.logs)
        if self._run is None:
            self._run = logs.parent.parent
            remove_left_in_memory()
        _wait_for(logs)
        environment = self._network() | ranks_environment(count_gpus(), asked.local_ranks)
        environment |= {**asked.environment, rank_logs.SUPERVISED: str(logs)}
        if not asked.launcher:
            environment |= slurm.rank_environment(environment) or _ALONE
        # the wrapper is a file of this node, or of its container
        command, log = [*asked.launcher, *wrapped(asked.command)], logs / self._log
        return RankProcesses(command, environment, asked.ranks, log, run=self._run, hang_seconds=asked.hang_seconds)

    def _network(self) -> dict[str, str]:
        # by default gloo takes the address of the host's name, which is often a loopback one
        interface = self._interface()
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _wait_for(logs: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_SEE_THE_LOGS
    while not logs.is_dir():
        if time.monotonic() > deadline:
            host = socket.gethostname()
            raise FileNotFoundError(
                f"run.directory: {host} doesn't see {logs}; it must be on a file system of all nodes"
            )
        time.sleep(_POLL_SECONDS)


def ranks_environment(gpus: int, ranks: int) -> dict[str, str]:
    """This process's environment for `ranks` on this machine, which are on the CPU if it has no `gpus`.

    Beside GPUs, the CPU has little to do unless the optimizer is offloaded; threads of all ranks on all cores would
    still be in each other's way.
    """
    threads = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return {**threads, **os.environ} if gpus else {**os.environ, **threads, ACCELERATOR: "cpu"}
