"""The commands that start the ranks of one machine, and their environment."""

import base64
import json
import os
import sys

from launch.rank_processes import with_own_gpus, wrapped
from pretrain.hardware.machine import ACCELERATOR, VISIBLE, threads_per_rank


def rank(arguments: list[str]) -> list[str]:
    """One rank of `pretrain train` with `arguments`; its RANK and the like are in the environment."""
    return wrapped(with_own_gpus([sys.executable, "-u", "-m", "pretrain", "train", *arguments]))


def deepspeed(options: list[str], arguments: list[str]) -> list[str]:
    """DeepSpeed's launcher of the ranks of one machine, with the options of `node_options`.

    The program `deepspeed --no_ssh` would start the same launcher, but import PyTorch and DeepSpeed twice before.
    """
    program = [sys.executable, "-u", "-m", "launch.deepspeed_launcher", *options]
    return [*program, "--no_local_rank", "--quiet", "--no_python", *rank(arguments)]


def node_options(ranks: dict[str, int], node: int, address: str, port: int) -> list[str]:
    """Options for the machine with number `node` of those in `ranks`, which maps names to numbers of ranks.

    The ranks meet at `address` and `port`.
    """
    world = json.dumps({name: list(range(number)) for name, number in ranks.items()})
    encoded = base64.urlsafe_b64encode(world.encode()).decode()
    return [f"--world_info={encoded}", f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]


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
