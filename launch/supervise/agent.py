"""The agent of a node: starts the node's ranks, reports to the head what becomes of them, and dies with the head.

Whoever starts it, ssh or srun, writes one line to its stdin: where the head listens, the token that admits the agent,
and the environment of the user. No secret is on a command line.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launch.supervise import commands
from launch.supervise.events import Event
from launch.supervise.rank_processes import RankProcesses
from launch.supervise.wire import Wire
from pretrain.run import rank_logs, slurm, stop_signals
from pretrain.run.hardware import count_gpus, free_port

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_CONNECT = 30.0
_SECONDS_TO_SEE_THE_LOGS = 90.0  # NFS may show a new directory a minute late


def agent() -> int:
    """Serves one attempt; returns 0 if the head has ended it, 1 if the head was lost."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in stop_signals.heeded():
        signal.signal(number, note)
    given = json.loads(sys.stdin.readline())
    os.environ |= given["environment"]
    os.chdir(given["directory"])
    wire = Wire(socket.create_connection(tuple(given["head"]), _SECONDS_TO_CONNECT))
    index = given["index"] if isinstance(given["index"], int) else int(os.environ[given["index"]])
    wire.send(
        {
            "token": given["token"],
            "index": index,
            "host": socket.gethostname(),
            "gpus": count_gpus(),
            "port": free_port(),
        }
    )
    ranks: RankProcesses | None = None
    try:
        while True:
            for message in wire.receive():
                if "end" in message:
                    return 0
                started = _start(message, wire)
                if isinstance(started, str):
                    wire.send({"event": Event("refused", lines=(started,))})
                else:
                    ranks = started
            if reason := wire.lost:
                print(f"the head is lost: {reason}; ending its ranks", file=sys.stderr)
                return 1
            for event in ranks.events() if ranks else ():
                wire.send({"event": event})
            if signals and ranks:
                wire.send({"event": Event("signal", signals[0])})
                signals.clear()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        if ranks:
            ranks.end()
        wire.close()


def _start(message: dict[str, Any], wire: Wire) -> RankProcesses | str:
    """Starts the ranks of `message`; if it can't, returns why."""
    logs = Path(message["logs"])
    if not _seen(logs):
        return f"run.directory: {socket.gethostname()} doesn't see {logs}; it must be on a file system of all nodes"
    gpus, local = count_gpus(), message["local_ranks"]
    environment = commands.environment(gpus, local) | message["environment"] | {rank_logs.SUPERVISED: str(logs)}
    if (interface := _interface(wire.own_address)) and not wire.own_address.startswith("127."):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo takes the host's name, often a loopback address
    options, arguments = message["deepspeed"], message["arguments"]
    if options is None:
        environment |= slurm.rank_environment(environment) or _ALONE
    command = commands.rank(arguments) if options is None else commands.deepspeed(options, arguments)
    return RankProcesses(command, environment, message["ranks"], logs / f"launcher-{message['index']}.log")


def _seen(logs: Path) -> bool:
    patience = time.monotonic() + _SECONDS_TO_SEE_THE_LOGS
    while not logs.is_dir():
        if time.monotonic() > patience:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def _interface(address: str) -> str | None:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
