"""`data-pipeline build` in an allocation of SLURM: Ray on each of its nodes, as long as the build."""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.processes import Process, ProcessGroup
from data_pipeline.foundation.signals import caught
from launch.multi_node import Ended
from pretrain.run import slurm

_SECONDS_TO_START, _POLL_SECONDS = 180.0, 0.2
_LAST_LINES = 5
_RAY = "from ray.scripts.scripts import main; main()"
_COUNT_NODES = """
import sys, time, ray
address, nodes, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < nodes:
    time.sleep(seconds)
"""
_REPEAT = f'until "$@"; do sleep {_POLL_SECONDS}; done'  # a process can't join Ray again once that failed


def build(path: Path, overrides: list[str], names: list[str], job: str, srun: list[str], container: list[str]) -> Ended:
    """Starts Ray on the nodes `names`, builds the corpus and takes Ray down again.

    SIGUSR1, SLURM's warning, ends the build, which can be resumed at any moment. So do SIGTERM and SIGINT.
    """
    with caught() as received, _ray(names, job, srun, container, received) as address, ProcessGroup() as group:
        if not received:
            build = [sys.executable, "-m", "data_pipeline", "build", str(path), *overrides, f"ray.address={address}"]
            process = group.start(build)
            if group.watch(stop=lambda: received) and process.code is not None:
                return Ended(process.code, False)
            group.end(signal.SIGINT)
    return Ended(STOPPED, received[0] == signal.SIGUSR1)


@contextlib.contextmanager
def _ray(names: list[str], job: str, srun: list[str], container: list[str], received: list[int]) -> Iterator[str]:
    """Runs Ray on each node within the block; yields its address.

    Ray answers only those who send its token, which nobody outside this job has.
    """
    host, port = slurm.node_address(names[0]), slurm.master_port(job)
    address = f"{host}:{port}"
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ProcessGroup() as group, ProcessGroup() as counting:  # srun forwards SIGTERM to Ray, which ends its processes
        for number, name in enumerate(names):
            where = (
                ["--head", f"--port={port}", "--include-dashboard=false"] if number == 0 else [f"--address={address}"]
            )
            options = [*where, "--block", "--disable-usage-stats", *([f"--num-cpus={cpus}"] if cpus else [])]
            on_node = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--cpu-bind=none", *srun]
            group.start([*on_node, *container, sys.executable, "-c", _RAY, "start", *options], output="file")
            if number == 0:
                _until(lambda: _listens(host, port), f"no answer at {address}", group, received)
        count = [sys.executable, "-c", _COUNT_NODES, address, str(len(names)), str(_POLL_SECONDS)]
        counted = counting.start(["sh", "-c", _REPEAT, "sh", *count], output="file")
        what = f"{len(names)} nodes of Ray didn't start at {address}"
        _until(lambda: counted.code == 0, what, group, received, counted)
        counting.end()
        yield address


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _POLL_SECONDS):
        return True
    return False


def _until(
    ready: Callable[[], bool], what: str, group: ProcessGroup, received: list[int], counting: Process | None = None
) -> None:
    """Waits until something of Ray is ready, or a signal comes. Raises FailedError if Ray doesn't come up."""
    deadline = time.monotonic() + _SECONDS_TO_START
    ended = group.watch(stop=lambda: received or ready() or time.monotonic() > deadline)
    if ended or time.monotonic() > deadline:
        said = [
            *(ended.last_lines(_LAST_LINES) if ended else []),
            *(counting.last_lines(_LAST_LINES) if counting else []),
        ]
        raise FailedError(f"ray: {what}: {'; '.join(said[-_LAST_LINES:])}")
