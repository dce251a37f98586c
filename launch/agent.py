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
from pretrain.run import rank_logs, slurm
from pretrain.run.hardware import count_gpus, free_port, network_interface_to

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
        # before it connects: the head waits only a second for what comes first
        handshake = Handshake(given["token"], index, socket.gethostname(), count_gpus(), free_port())
        connection = Connection(socket.create_connection(tuple(given["head"]), _SECONDS_TO_CONNECT))
        connection.send(asdict(handshake))
        started: list[RankProcesses] = []
        try:
            while True:
                for message in connection.receive():
                    if "end" in message:
                        return 0
                    try:
                        started.append(_start(message, connection, index))
                    except FileNotFoundError as error:
                        connection.send({"event": Event("refused", lines=(str(error),))})
                if reason := connection.lost:
                    print(f"the head is lost: {reason}; ending its ranks", file=sys.stderr)
                    return 1
                for processes in started:
                    for event in processes.events():
                        connection.send({"event": event})
                if signals and started:
                    connection.send({"event": Event("signal", signals[0])})
                    signals.clear()
                time.sleep(_POLL_SECONDS)
        finally:
            for processes in started:
                processes.end()
            connection.close()


def _start(message: dict[str, Any], connection: Connection, index: int) -> RankProcesses:
    """Starts the processes of a request. Raises FileNotFoundError if the directory of the logs isn't there."""
    # by default gloo takes the address of the host's name, which is often a loopback one
    interface = network_interface_to(connection.address)
    network = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    if "program" in message:
        program = StartProgram(**message["program"])
        command = [sys.executable, "-P", "-m", program.module]
        return RankProcesses(command, {**network, **os.environ, **program.environment}, number=program.number)
    request = StartRanks(**message["ranks"])
    logs = Path(request.logs)
    _wait_for(logs)
    environment = network | rank_commands.environment(count_gpus(), request.local_ranks) | request.environment
    environment[rank_logs.SUPERVISED] = str(logs)
    if request.deepspeed is None:
        environment |= slurm.rank_environment(environment) or _ALONE
        command = rank_commands.rank(request.arguments)
    else:
        command = rank_commands.deepspeed(request.deepspeed, request.arguments)
    return RankProcesses(command, environment, request.ranks, logs / f"launcher-{index}.log")


def _wait_for(logs: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_SEE_THE_LOGS
    while not logs.is_dir():
        if time.monotonic() > deadline:
            host = socket.gethostname()
            raise FileNotFoundError(
                f"run.directory: {host} doesn't see {logs}; it must be on a file system of all nodes"
            )
        time.sleep(_POLL_SECONDS)
