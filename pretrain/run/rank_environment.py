"""Reads which rank this process is, from the variables that a launcher sets: torchrun, DeepSpeed's, or `launch`.
Nothing else reads these variables."""

import os
from dataclasses import dataclass

from data_pipeline.base.errors import UserError
from pretrain.hardware import free_port

LOOPBACK = "127.0.0.1"
_OF_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankEnvironment:
    """The variables of a rank.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        local_rank: this rank among the ranks of this machine.
        local_world_size: the number of ranks of this machine.
        master_addr: where the ranks meet.
        master_port: where the ranks meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def is_launched() -> bool:
    """True if a launcher has started this process as a rank. Otherwise the process trains alone."""
    return "RANK" in os.environ


def rank_environment() -> RankEnvironment:
    """The variables of a rank that `is_launched`. Raises UserError if the launcher has left out a variable."""
    if lacking := [name for name in _OF_LAUNCHERS if name not in os.environ]:
        raise UserError(
            f"RANK is set, but not {', '.join(lacking)}: a launcher sets all of them; without one, unset RANK"
        )
    return RankEnvironment(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=local_world_size(),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )


def local_world_size() -> int:
    """The number of ranks on this machine, by LOCAL_SIZE (DeepSpeed's launcher) or LOCAL_WORLD_SIZE (torchrun). 1:
    without a launcher."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def be_the_only_rank() -> None:
    """Sets the variables as a launcher would for a single rank. PyTorch and DeepSpeed read them."""
    # without LOCAL_SIZE, DeepSpeed starts a program at each reduction to count the CPUs
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": LOOPBACK}
    os.environ |= {**single, "MASTER_PORT": str(free_port())}
