"""The agent of a node: starts processes for the head, reports their events, and ends them when the head is gone.

ssh or srun, which starts it, writes one line to its stdin: where the head listens, the token that admits the agent,
and the environment of the user. No secret is on a command line.
"""

import json
import os
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.foundation.signals import caught
from launch import rank_commands
from launch.protocol import Connection, Event, Handshake, StartProgram, StartRanks
from launch.rank_processes import RankProcesses
from pretrain.checkpoint import left_in_memory
from pretrain.hardware.machine import count_gpus, free_port, network_interface_to
from pretrain.run import rank_logs, slurm
from pretrain.run.heartbeat import Heartbeat

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
_POLL_SECONDS = 0.2
_SECONDS_TO_CONNECT = 30.0
_TRIES = 5  # connections to a head that closes them before it has asked for anything
_SECONDS_TO_SEE_THE_LOGS = 90.0  # NFS may show a new directory a minute late


def agent() -> int:
    """Serves one head; returns 0 if the head has ended it, 1 if the head was lost."""
    with caught() as signals:
        given = json.loads(sys.stdin.readline())
        os.environ |= given["environment"]
        os.chdir(given["directory"])
        index = given["index"] if isinstance(given["index"], int) else int(os.environ[given["index"]])
        # before it connects: the head waits only a second for what comes first
        handshake = Handshake(given["token"], index, socket.gethostname(), count_gpus(), free_port())
        connection = _connected(given["head"], handshake)
        node, tries = _NodeProcesses(connection, index), 1
        try:
            while True:
                for message in connection.receive():
                    if "end" in message:
                        node.end()
                        if not message["run_goes_on"]:
                            node.forget()
                        return 0
                    try:
                        node.obey(message)
                    except FileNotFoundError as error:
                        connection.send({"event": Event("refused", lines=(str(error),))})
                if connection.lost and node.idle and tries < _TRIES:
                    # on a busy machine, what it sent may have come later than the head waits
                    tries += 1
                    connection.close()
                    node.connection = connection = _connected(given["head"], handshake)
                if reason := connection.lost:
                    print(f"the head is lost: {reason}; ending its ranks", file=sys.stderr)
                    return 1
                for processes in node.started:
                    for event in processes.events():
                        connection.send({"event": event})
                if signals and node.started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            node.end()
            connection.close()


def _connected(head: list[Any], handshake: Handshake) -> Connection:
    """A connection to the head, which has been shown the token. Raises OSError if nobody listens there."""
    connection = Connection(socket.create_connection(tuple(head), _SECONDS_TO_CONNECT))
    connection.send(asdict(handshake))
    return connection


class _NodeProcesses:
    """What the head has had this node start. `started` has the programs, and the ranks of the attempt that runs."""

    def __init__(self, connection: Connection, index: int):
        self.started: list[RankProcesses] = []
        self.connection, self._index = connection, index
        self.idle = True  # until the head asks for something
        self._request: StartRanks | None = None  # the last one

    def obey(self, message: dict[str, Any]) -> None:
        """Does what a message asks for. Raises FileNotFoundError if the directory of the logs isn't there."""
        self.idle = False
        if "program" in message:
            program = StartProgram(**message["program"])
            command = [sys.executable, "-P", "-m", program.module]
            environment = {**self._network(), **os.environ, **program.environment}
            self.started.append(RankProcesses(command, environment, number=program.number))
        elif "ranks" in message:
            if self._request is None:
                left_in_memory.remove_left()
            self._request = StartRanks(**message["ranks"])
            self.started.append(self._ranks(self._request))
        elif "end_ranks" in message:
            heartbeats: dict[int, Heartbeat] = {}
            for processes in self.started:
                processes.end()
                heartbeats |= processes.heartbeats
            self.started.clear()
            shown = {rank: asdict(heartbeat) for rank, heartbeat in heartbeats.items()}
            self.connection.send({"ended": shown, "port": free_port()})

    def forget(self) -> None:
        """Removes what the run has left in this node's memory, unless it is newer than what the disk has."""
        if self._request and (kept := left_in_memory.release(Path(self._request.logs).parent.parent)):
            print(f"{socket.gethostname()}: {kept}", file=sys.stderr, flush=True)

    def end(self) -> None:
        for processes in self.started:
            processes.end()
        self.started.clear()

    def _ranks(self, request: StartRanks) -> RankProcesses:
        logs = Path(request.logs)
        _wait_for(logs)
        environment = self._network() | rank_commands.environment(count_gpus(), request.local_ranks)
        environment |= request.environment
        environment[rank_logs.SUPERVISED] = str(logs)
        if request.deepspeed is None:
            environment |= slurm.rank_environment(environment) or _ALONE
            command = rank_commands.rank(request.arguments)
        else:
            command = rank_commands.deepspeed(request.deepspeed, request.arguments)
        run, log = logs.parent.parent, logs / f"launcher-{self._index}.log"
        return RankProcesses(command, environment, request.ranks, log, run=run, hang_seconds=request.hang_seconds)

    def _network(self) -> dict[str, str]:
        # by default gloo takes the address of the host's name, which is often a loopback one
        interface = network_interface_to(self.connection.address)
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
