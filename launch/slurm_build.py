"""`data-pipeline build` in an allocation of SLURM: Ray on each of its nodes, as long as the build."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError, UserError
from launch.slurm import requeue_job
from pretrain.run import slurm

_SECONDS_TO_START, _SECONDS_TO_END, _SECONDS_BETWEEN_LOOKS = 180.0, 30.0, 0.2
_LAST_LINES = 5
_RAY = "from ray.scripts.scripts import main; main()"


def build(path: Path, overrides: list[str], requeue: bool, srun: list[str], container: list[str]) -> int:
    """Starts Ray, builds the corpus and takes Ray down again; returns the exit code.

    SIGUSR1, SLURM's warning, ends the build: it can be resumed at any moment, and with `requeue` the job goes back into
    the queue. So do SIGTERM and SIGINT, without that.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("launch build-head: not in an allocation of SLURM; `launch slurm` writes the script for it")
    names = slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    with _ray(names, job, srun, container, received) as address:
        command = [sys.executable, "-m", "data_pipeline", "build", str(path), *overrides, f"ray.address={address}"]
        code = None if received else _waited(subprocess.Popen(command), received)
    if code is not None:
        return code
    if requeue and received[0] == signal.SIGUSR1:
        requeue_job(job)
    return STOPPED


def _waited(process: "subprocess.Popen[bytes]", received: list[int]) -> int | None:
    """The exit code; None if a signal came first, which has ended the process."""
    while process.poll() is None:
        if received:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            process.wait()
            return None
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return process.returncode


@contextlib.contextmanager
def _ray(names: list[str], job: str, srun: list[str], container: list[str], received: list[int]) -> Iterator[str]:
    """Runs Ray on each node within the block; yields its address.

    Nobody outside this job knows the token without which Ray answers nothing.
    """
    host, port = slurm.address_of(names[0]), slurm.master_port(job)
    address = f"{host}:{port}"
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= environment
    started: list[subprocess.Popen[bytes]] = []
    output = tempfile.TemporaryFile()  # noqa: SIM115 (pages of it, and of use only where Ray doesn't start)
    try:
        for number, name in enumerate(names):
            where = ["--head", f"--port={port}"] if number == 0 else [f"--address={address}"]
            options = [*where, "--block", "--disable-usage-stats", *([f"--num-cpus={cpus}"] if cpus else [])]
            options += ["--include-dashboard=false"] if number == 0 else []
            ray = [*container, sys.executable, "-c", _RAY, "start", *options]
            begin = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--cpu-bind=none", *srun]
            command = [*begin, *ray]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            )
            if number == 0:
                _until(lambda: _listens(host, port), f"no answer at {address}", started, output, received)
        with contextlib.closing(_Counting(address, len(names), output)) as counting:
            what = f"{len(names)} nodes of Ray didn't start at {address}"
            _until(counting.done, what, started, output, received)
        yield address
    finally:
        for process in started:
            process.terminate()  # srun forwards it to Ray, which ends its processes
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            process.wait()
        output.close()


_JOIN = """
import sys, time, ray
address, nodes, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < nodes:
    time.sleep(seconds)
"""


class _Counting:
    """Waits, in a process of its own, until Ray has so many nodes: a process can't join Ray again once that failed."""

    def __init__(self, address: str, nodes: int, output: IO[bytes]):
        self._command = [sys.executable, "-c", _JOIN, address, str(nodes), str(_SECONDS_BETWEEN_LOOKS)]
        self._output = output
        self._process = self._begun()

    def done(self) -> bool:
        code = self._process.poll()
        if code:  # the first node isn't ready yet
            self._process = self._begun()
        return code == 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _begun(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=self._output, stderr=self._output)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _SECONDS_BETWEEN_LOOKS):
        return True
    return False


def _until(
    true: Callable[[], bool],
    what: str,
    started: list["subprocess.Popen[bytes]"],
    output: IO[bytes],
    received: list[int],
) -> None:
    """Waits until something of Ray is true, or a signal comes. Raises FailedError if Ray doesn't come up."""
    patience = time.monotonic() + _SECONDS_TO_START
    while not received and not true():
        if any(process.poll() is not None for process in started) or time.monotonic() > patience:
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
            raise FailedError(f"ray: {what}: {'; '.join(said[-_LAST_LINES:])}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
