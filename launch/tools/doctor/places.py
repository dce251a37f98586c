"""Runs this project's hidden commands on the machines of a run: here, on hosts by ssh, in an allocation by srun."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.foundation.errors import UserError
from launch import hosts
from launch.cluster import ClusterConfig
from launch.nodes import Node, address_towards
from pretrain.run import slurm

_LINES = 3
_SECONDS_MORE = 5.0  # for a machine to say that it gives up


@dataclass(frozen=True)
class Starter:
    """A command that starts `launch doctor-node` on one machine or on several.

    `index` is the number of the machine, or the variable of the environment there that holds it.
    """

    command: list[str]
    index: int | str
    environment: dict[str, str]
    names: list[str]


@dataclass(frozen=True)
class Place:
    """The machines to check, and how to start something on each. A node of 0 ranks has one for each GPU, or one.

    `master` is an address of the first machine for the others, unless ssh connects to it at another one.
    """

    nodes: list[Node]
    starters: list[Starter]
    master: str = "127.0.0.1"


@dataclass(frozen=True)
class Line:
    """One line of a machine: its message and this machine's time when it arrived."""

    message: dict[str, Any]
    arrived: float


_COMMAND = "doctor-node"
_HERE = [sys.executable, "-P", "-m", "launch", _COMMAND]


def here(ranks: int | None) -> Place:
    name = "this machine"
    return Place([Node(name, ranks or 0)], [Starter(_HERE, 0, {}, [name])])


def on_hosts(hostfile: Path, ssh: list[str]) -> Place:
    """The hosts of a file in DeepSpeed's format. Raises UserError for a file that can't be read."""
    nodes = hosts.read(hostfile)
    if shutil.which("ssh") is None:
        raise UserError("ssh is not on the PATH; `launch doctor --hostfile` reaches the hosts with it")
    starters = [
        Starter(
            [*hosts.SSH, *ssh, "--", node.name, hosts.remote_command(_COMMAND)], index, hosts.handed_over(), [node.name]
        )
        for index, node in enumerate(nodes)
    ]
    return Place(nodes, starters, address_towards(hosts.resolved(nodes[-1].name, ssh)))


def in_allocation(ranks: int | None, cluster: ClusterConfig) -> Place:
    """The nodes of the SLURM allocation that this process is in, with `ranks` on each, in the cluster's container."""
    names = slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])
    number = len(names)
    srun = ["srun", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"]
    nodes = [Node(name, ranks or 0) for name in names]
    command = [*srun, *cluster.srun, *cluster.container, *_HERE]
    return Place(nodes, [Starter(command, "SLURM_NODEID", cluster.variables, names)], slurm.address_of(names[0]))


def everywhere(place: Place, given: dict[str, Any], seconds: float, problems: dict[str, str]) -> Iterator[Line]:
    """Starts `launch doctor-node` on every machine; yields what they say as it comes.

    After `seconds`, and for starters that fail, notes in `problems` what happened, by the machines' names.
    """
    lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
    started = [_started(starter, given, lines) for starter in place.starters]
    left, patience = len(started), time.monotonic() + seconds + _SECONDS_MORE
    while left:
        try:
            line = lines.get(timeout=max(0.0, patience - time.monotonic()))
        except queue.Empty:
            break
        if line is None:
            left -= 1
        else:
            yield line
    for starter, (process, errors) in zip(place.starters, started, strict=True):
        code = process.poll() if left else process.wait()
        if code is None:
            process.kill()
        if code != 0:
            what = f"no answer within {seconds:g} s" if code is None else f"ended with exit code {code}"
            said = "; ".join(errors[-_LINES:])
            for name in starter.names:
                problems[name] = f"{starter.command[0]}: {what}" + (f": {said}" if said else "")


def _started(
    starter: Starter, given: dict[str, Any], lines: "queue.SimpleQueue[Line | None]"
) -> "tuple[subprocess.Popen[str], list[str]]":
    process = subprocess.Popen(
        starter.command,
        text=True,
        errors="replace",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # ssh must not ask for a password on the terminal
    )
    errors: list[str] = []
    message = json.dumps({**given, "index": starter.index, "environment": starter.environment}) + "\n"

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(Line(json.loads(line), time.time()))
        of_errors.join()
        lines.put(None)

    def read_errors() -> None:
        assert process.stderr
        errors.extend(line.strip() for line in process.stderr if line.strip())

    def write() -> None:
        assert process.stdin
        try:
            process.stdin.write(message)
            process.stdin.close()
        except BrokenPipeError:  # it has ended, and says why
            pass

    of_errors = threading.Thread(target=read_errors, daemon=True)
    for thread in (of_errors, *(threading.Thread(target=work, daemon=True) for work in (read, write))):
        thread.start()
    return process, errors
