"""`data-pipeline build` in an allocation of SLURM: Ray on each of its nodes, as long as the build."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError, UserError
from launch.slurm import requeue_job
from pretrain.run import slurm

_SECONDS_TO_START, _SECONDS_TO_END, _SECONDS_BETWEEN_LOOKS = 180.0, 30.0, 0.5
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
    host = slurm.address_of(names[0])
    address = f"{host}:{slurm.master_port(job)}"
    cpus = os.environ.get("SLURM_CPUS_ON_NODE")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= environment
    started: list[subprocess.Popen[bytes]] = []
    output = tempfile.TemporaryFile()  # noqa: SIM115 (pages of it, and of use only where Ray doesn't start)
    try:
        for number, name in enumerate(names):
            where = ["--head", f"--port={slurm.master_port(job)}"] if number == 0 else [f"--address={address}"]
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
                _until_there(address, 1, started, output, received)
        _until_there(address, len(names), started, output, received)
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


_COUNT = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
"""


def _until_there(
    address: str, nodes: int, started: list["subprocess.Popen[bytes]"], output: IO[bytes], received: list[int]
) -> None:
    """Waits until Ray has so many nodes. Raises FailedError if it doesn't come up."""
    patience = time.monotonic() + _SECONDS_TO_START
    while not received:
        count = subprocess.run([sys.executable, "-c", _COUNT, address], capture_output=True, text=True)
        if count.returncode == 0 and int(count.stdout.split()[-1]) >= nodes:
            return
        if any(process.poll() is not None for process in started) or time.monotonic() > patience:
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines() + count.stderr.strip().splitlines()
            raise FailedError(f"ray: {nodes} nodes of Ray didn't start at {address}: {'; '.join(said[-_LAST_LINES:])}")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
