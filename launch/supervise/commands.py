"""The commands that start the ranks of one machine, and their environment."""

import base64
import json
import os
import sys
from pathlib import Path

from launch.supervise.rank_processes import kept, with_own_gpus
from pretrain.run.hardware import ACCELERATOR, VISIBLE, threads_per_rank


def rank(arguments: list[str]) -> list[str]:
    """One rank of `pretrain train` with `arguments`; its RANK and the like are in the environment."""
    return kept(with_own_gpus([sys.executable, "-u", "-m", "pretrain", "train", *arguments]))


def deepspeed(options: list[str], arguments: list[str]) -> list[str]:
    """The program `deepspeed` with `options`, which starts all ranks of this machine among those of others."""
    return _below([str(Path(sys.executable).with_name("deepspeed")), *options], arguments)


def deepspeed_here(ranks: int, port: int, arguments: list[str]) -> list[str]:
    """The part of DeepSpeed's launcher that starts `ranks` on this machine alone; the whole is slower to start."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    program = [sys.executable, "-u", "-m", "launch.node_launcher"]
    return _below([*program, f"--world_info={world}", f"--master_port={port}"], arguments)


def _below(launcher: list[str], arguments: list[str]) -> list[str]:
    return [*launcher, "--no_local_rank", "--quiet", "--no_python", *rank(arguments)]


def environment(gpus: int, ranks: int) -> dict[str, str]:
    """This process's environment for `ranks` on this machine, which are on the CPU if it has no `gpus`.

    Beside GPUs, the CPU has little to do unless the optimizer is offloaded; threads of all ranks on all cores would
    still be in each other's way.
    """
    given = {name: value for name, value in os.environ.items() if name != VISIBLE}  # with_own_gpus restores it
    threads = str(threads_per_rank(ranks))
    if not gpus:
        return {**given, ACCELERATOR: "cpu", "OMP_NUM_THREADS": threads}
    return {"OMP_NUM_THREADS": threads, **given}
