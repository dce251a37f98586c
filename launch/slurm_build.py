"""`data-pipeline build` in an allocation of SLURM: Ray on each of its nodes, as long as the build."""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.processes import Process, ProcessGroup
from data_pipeline.foundation.signals import caught
from launch.attempts import Ended
from pretrain.run import slurm

_SECONDS_TO_START, _SECONDS_TO_STOP, _POLL_SECONDS = 180.0, 30.0, 0.2
_LAST_LINES = 5
_RAY = "from ray.scripts.scripts import main; main()"


def build_corpus(arguments: Sequence[str], names: list[str], job: str, srun: list[str], container: list[str]) -> Ended:
    """Starts Ray on the nodes `names`, builds the corpus with the `arguments` of the command, and ends Ray.

    The build begins on the first node; the others take part as soon as their Ray is up. SIGUSR1, SLURM's warning, ends
    the build, which can be resumed at any moment. So do SIGTERM and SIGINT. Raises FailedError if Ray ends on a node.
    """
    host, port = slurm.node_address(names[0]), slurm.master_port(job)
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    # Ray answers only those who send its token, which nobody outside this job has
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with caught() as received, ProcessGroup() as group:  # srun forwards SIGTERM to Ray, which ends its processes
        for number, name in enumerate(names):
            where = ["--head", f"--port={port}", "--include-dashboard=false"] if number == 0 else []
            where = where or [f"--address={host}:{port}"]
            options = [*where, "--block", "--disable-usage-stats", *([f"--num-cpus={cpus}"] if cpus else [])]
            on_node = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--cpu-bind=none", *srun]
            ray = group.start([*on_node, *container, sys.executable, "-c", _RAY, "start", *options], output="file")
            if number == 0:
                _wait_for_head(ray, host, port, received)
        process = group.start(
            [sys.executable, "-m", "data_pipeline", "build", *arguments, f"ray.address={host}:{port}"]
        )
        if ended := group.watch(stop=lambda: received):
            if ended is not process:
                raise _ended(ended)
            return Ended(ended.code or 0, False)
        process.send_signal(signal.SIGINT)
        process.wait(_SECONDS_TO_STOP)
    return Ended(STOPPED, received[0] == signal.SIGUSR1)


def _wait_for_head(ray: Process, host: str, port: int, received: list[int]) -> None:
    """Waits until Ray's head listens, or a signal comes. Raises FailedError if it doesn't start."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while not received:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _POLL_SECONDS):
            return
        if ray.code is not None or time.monotonic() > deadline:
            raise _ended(ray)
        time.sleep(_POLL_SECONDS)


def _ended(ray: Process) -> FailedError:
    code = "doesn't start" if ray.code is None else f"ended with exit code {ray.code}"
    return FailedError(f"ray: {code}: {'; '.join(ray.last_lines(_LAST_LINES))}")
