"""Ranks on this machine, started by the deepspeed launcher."""

import os
import socket
import sys
from pathlib import Path

from data_pipeline.config_file import load
from data_pipeline.errors import UserError
from launch.supervise import supervise
from pretrain.config import RunConfig
from pretrain.setup import prepare


def launch_local(path: Path, overrides: list[str], ranks: int | None, stop_at_step: int | None) -> int:
    """Checks the run file, starts `ranks` processes and waits for them; returns the exit code of the run."""
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        raise UserError(f"--ranks: {ranks}, but this machine has {gpus} GPUs")
    ranks = ranks or gpus or 1
    config = load(path, overrides, RunConfig)
    prepare(config, 0, ranks)  # every problem is told here, once, and not by each rank
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        "--num_gpus",  # which for DeepSpeed also means CPU ranks
        str(ranks),
        "--master_port",
        str(_free_port()),
        "--no_local_rank",
        "--quiet",
        "--module",
        "pretrain",
        "train",
        str(path),
        *overrides,
    ]
    if stop_at_step:
        command += ["--stop-at-step", str(stop_at_step)]
    return supervise(command, _environment(gpus, ranks), Path(config.run.directory))


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return len(devices) if visible is None else min(len(devices), len([part for part in visible.split(",") if part]))


def _environment(gpus: int, ranks: int) -> dict[str, str]:
    environment = dict(os.environ)
    if not gpus:
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
