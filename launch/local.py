"""Ranks on this machine, started by the deepspeed launcher."""

import os
import sys
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from launch.rank_processes import kept, with_own_gpus
from launch.supervise import supervise
from pretrain.checkpoint.choose import newest
from pretrain.config import RunConfig
from pretrain.run import lock, status
from pretrain.run.hardware import VISIBLE, count_gpus, free_port, threads_per_rank
from pretrain.setup import prepare


def launch_local(
    path: Path, overrides: list[str], ranks: int | None, stop_at_step: int | None, fresh: bool = False
) -> int:
    """Checks the run file, starts `ranks` processes and waits for them; returns the exit code of the run.

    `fresh` starts a new run and moves an existing one in the run directory aside.
    """
    gpus = count_gpus()
    if gpus and ranks and ranks > gpus:
        raise UserError(f"--ranks: {ranks}, but this machine has {gpus} GPUs")
    ranks = ranks or gpus or 1
    config = load(path, overrides, RunConfig)
    run = Path(config.run.directory)
    lock.check(run)
    # reports every problem once, before each rank would
    prepare(config, 0, ranks, None if fresh else newest(run))
    if fresh and (aside := status.move_aside(run)):
        print(f"{run}: moved the existing run to {aside}", flush=True)
    options = ["--stop-at-step", str(stop_at_step)] if stop_at_step else []
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        "--num_gpus",  # DeepSpeed counts CPU ranks with it too
        str(ranks),
        "--master_port",
        str(free_port()),
        "--no_local_rank",
        "--quiet",
        "--no_python",
        *kept(with_own_gpus([sys.executable, "-u", "-m", "pretrain", "train", str(path), *overrides, *options])),
    ]
    return supervise(command, _environment(gpus, ranks), run, ranks, config.faults.dead_rank_seconds)


def _environment(gpus: int, ranks: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}  # with_own_gpus restores it
    if not gpus:
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return environment
