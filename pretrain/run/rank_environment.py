"""Reads how this process was started: its rank, from the variables that a launcher sets (torchrun, DeepSpeed's, or
`launch`), and the command and the SLURM job, which RUN/environment.json keeps. Nothing else reads these variables."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import masked
from data_pipeline.base.json_file import read_valid_json
from pretrain.hardware import free_port
from pretrain.run import rank_logs

LOOPBACK = "127.0.0.1"
_OF_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = "environment.json"
COMMAND = "PRETRAIN_COMMAND"  # variable: the command that started the supervisor of this rank, or the job of this head
_COMMANDS = ("launch", "pretrain")


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


@dataclass(frozen=True)
class StartedBy:
    """What started an attempt.

    Attributes:
        command: the command; "" if a Python program or another launcher started the run.
        job: the id of the SLURM job; "" outside SLURM.
    """

    command: str = ""
    job: str = ""


def command() -> str:
    """The command of COMMAND, or this process's own if it is `launch` or `pretrain`, without passwords; else ""."""
    if variable := os.environ.get(COMMAND):
        return variable
    program = Path(sys.argv[0])
    if program.name in _COMMANDS:
        words = [program.name]
    elif program.name == "__main__.py" and program.parent.name in _COMMANDS:
        words = ["python", "-m", program.parent.name]
    else:
        return ""
    return masked(shlex.join([*words, *sys.argv[1:]]))


def started_by(ranks: int) -> StartedBy:
    """What started this process, which is one of `ranks` ranks."""
    alone = ranks == 1 and rank_logs.supervised() is None
    known = alone or COMMAND in os.environ  # a supervisor tells its command, other launchers don't
    return StartedBy(command() if known else "", os.environ.get("SLURM_JOB_ID", ""))


def last_started_by(run: Path) -> StartedBy:
    """What started the last attempt of the run; empty if nobody knows."""
    return read_valid_json(run / ENVIRONMENT, StartedBy) or StartedBy()
