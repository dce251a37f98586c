"""Ranks on this machine, started by the deepspeed launcher."""

import base64
import json
import os
import sys
from pathlib import Path

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from launch.rank_processes import kept, with_own_gpus
from launch.supervise import supervise
from pretrain.checkpoint.choose import is_sound, newest
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
    setup = prepare(config, 0, ranks, None if fresh else newest(run))
    if setup.finished and setup.resume and is_sound(setup.resume):  # else the ranks resume from an earlier checkpoint
        print(setup.nothing_left)
        return 0
    if fresh and (aside := status.move_aside(run)):
        print(f"{run}: moved the existing run to {aside}", flush=True)
    options = ["--stop-at-step", str(stop_at_step)] if stop_at_step else []
    command = [
        *(sys.executable, "-u", "-m", "launch.node_launcher"),
        f"--world_info={_world(ranks)}",
        f"--master_port={free_port()}",
        "--no_local_rank",
        "--quiet",
        "--no_python",
        *kept(with_own_gpus([sys.executable, "-u", "-m", "pretrain", "train", str(path), *overrides, *options])),
    ]
    return supervise(command, _environment(gpus, ranks), run, ranks, config.faults.dead_rank_seconds)


def _world(ranks: int) -> str:
    """The machines and the numbers of their ranks, as DeepSpeed's launcher takes them."""
    return base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()


def _environment(gpus: int, ranks: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}  # with_own_gpus restores it
    if not gpus:
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    return environment
