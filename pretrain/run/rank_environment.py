"""Reads which rank this process is, from the variables that a launcher sets: torchrun, DeepSpeed's, or `launch`.
Nothing else reads these variables."""

import os
from collections.abc import Mapping
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
    """The variables of a rank that `is_launched`. Raises UserError if a variable is left out or isn't such a number."""
    if lacking := [name for name in _OF_LAUNCHERS if name not in os.environ]:
        raise UserError(
            f"RANK is set, but not {', '.join(lacking)}: a launcher sets all of them; without one, unset RANK"
        )
    world_size = number(os.environ, "WORLD_SIZE", 1)
    return RankEnvironment(
        rank=number(os.environ, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=number(os.environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size(),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=number(os.environ, "MASTER_PORT", 1, 65535),
    )


def local_world_size() -> int:
    """The number of ranks on this machine, by LOCAL_SIZE (DeepSpeed's launcher) or LOCAL_WORLD_SIZE (torchrun). 1:
    without a launcher."""
    name = next((name for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE") if os.environ.get(name)), None)
    return number(os.environ, name, 1) if name else 1


def number(variables: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    """The integer in the variable `name`. Raises UserError unless it is one from `least` to `most`, if there is a
    `most`."""
    text = variables[name].strip()
    if not text.isdecimal() or not least <= int(text) <= (int(text) if most is None else most):
        expected = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
        raise UserError(
            f"{name} is {text!r} in the environment; expected {expected}, which a launcher sets; without a launcher, "
            "unset its variables"
        )
    return int(text)


def be_the_only_rank() -> None:
    """Sets the variables as a launcher would for a single rank. PyTorch and DeepSpeed read them."""
    # without LOCAL_SIZE, DeepSpeed starts a program at each reduction to count the CPUs
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": LOOPBACK}
    os.environ |= {**single, "MASTER_PORT": str(free_port())}
