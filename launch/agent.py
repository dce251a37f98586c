"""What a node does for the head: it starts processes, reports their events, and ends them once the head is gone.

On the head's own machine, that happens in the head's process. On others an agent does it. ssh or srun, which starts
the agent, writes one line to its stdin: where the head listens, the token that admits the agent, and the environment
of the user. No secret is on a command line.
"""

import base64
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.foundation.signals import caught
from launch.protocol import Connection, Event, Handshake, StartProgram, StartRanks
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
        connection, tries = _connected(given["head"], handshake), 1
        node = NodeProcesses(lambda: network_interface_to(connection.address), f"launcher-{index}.log")
        try:
            while True:
                for message in connection.receive():
                    for answer in node.obey(message):
                        connection.send(answer)
                if node.ended:
                    return 0
                if connection.lost and node.idle and tries < _TRIES:
                    # on a busy machine, what it sent may have come later than the head waits
                    tries += 1
                    connection.close()
                    connection = _connected(given["head"], handshake)
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


def _connected(head: list[Any], handshake: Handshake) -> Connection:
    """A connection to the head, which has been shown the token. Raises OSError if nobody listens there."""
    connection = Connection(socket.create_connection(tuple(head), _SECONDS_TO_CONNECT))
    connection.send(asdict(handshake))
    return connection


class NodeProcesses:
    """What the head has had this node start. `started` has the programs, and the ranks of the attempt that runs.

    `interface` names the network interface of the ranks, None if gloo is to choose. The launcher's lines go to the file
    `log` in the directory of the logs. `idle`: the head hasn't asked for anything yet; `ended`: it has asked to end.
    """

    def __init__(self, interface: Callable[[], str | None], log: str):
        self.started: list[RankProcesses] = []
        self.idle, self.ended = True, False
        self._interface, self._log = interface, log
        self._run: Path | None = None  # the directory of the run whose ranks it has started

    def obey(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Does what a message asks for; returns the answer."""
        self.idle = False
        if "program" in message:
            program = StartProgram(**message["program"])
            command = [sys.executable, "-P", "-m", program.module]
            environment = {**self._network(), **os.environ, **program.environment}
            self.started.append(RankProcesses(command, environment, number=program.number))
        elif "ranks" in message:
            try:
                self.started.append(self._ranks(StartRanks(**message["ranks"])))
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

    def _ranks(self, request: StartRanks) -> RankProcesses:
        """Raises FileNotFoundError if the directory of the logs isn't there."""
        logs = Path(request.logs)
        if self._run is None:
            self._run = logs.parent.parent
            remove_left_in_memory()
        _wait_for(logs)
        environment = self._network() | ranks_environment(count_gpus(), request.local_ranks)
        environment |= {**request.environment, rank_logs.SUPERVISED: str(logs)}
        if request.deepspeed is None:
            environment |= slurm.rank_environment(environment) or _ALONE
            command = _rank(request.arguments)
        else:
            command = _deepspeed(request.deepspeed, request.arguments)
        run, hang = self._run, request.hang_seconds
        return RankProcesses(command, environment, request.ranks, logs / self._log, run=run, hang_seconds=hang)

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


def _rank(arguments: list[str]) -> list[str]:
    """One rank of `pretrain train` with `arguments`; its RANK and the like are in the environment."""
    return wrapped([sys.executable, "-u", "-m", "pretrain", "train", *arguments])


def _deepspeed(options: list[str], arguments: list[str]) -> list[str]:
    """DeepSpeed's launcher of the ranks of one machine, with the options of `node_options`.

    The program `deepspeed --no_ssh` would start the same launcher, but import PyTorch and DeepSpeed twice before.
    """
    program = [sys.executable, "-u", "-m", "launch.deepspeed_launcher", *options]
    return [*program, "--no_local_rank", "--quiet", "--no_python", *_rank(arguments)]


def node_options(ranks: dict[str, int], node: int, address: str, port: int) -> list[str]:
    """Options of DeepSpeed's launcher for the machine with number `node` of those in `ranks`: {name: number of ranks}.

    The ranks meet at `address` and `port`.
    """
    world = json.dumps({name: list(range(number)) for name, number in ranks.items()})
    encoded = base64.urlsafe_b64encode(world.encode()).decode()
    return [f"--world_info={encoded}", f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]


def ranks_environment(gpus: int, ranks: int) -> dict[str, str]:
    """This process's environment for `ranks` on this machine, which are on the CPU if it has no `gpus`.

    Beside GPUs, the CPU has little to do unless the optimizer is offloaded; threads of all ranks on all cores would
    still be in each other's way.
    """
    threads = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return {**threads, **os.environ} if gpus else {**os.environ, **threads, ACCELERATOR: "cpu"}
