"""How the attempt of a run was started: the command and the SLURM job, which RUN/environment.json keeps."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.base.formatting import masked
from data_pipeline.base.json_file import read_valid_json

FILE_NAME = "environment.json"
COMMAND = "PRETRAIN_COMMAND"  # variable: the command that started the supervisor of this rank, or the job of this head
_COMMANDS = ("launch", "pretrain")


@dataclass(frozen=True)
class StartedBy:
    """What started an attempt.

    Attributes:
        command: the command, which also resumes the run; "" if a Python program or another launcher started the run.
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


def this_attempt(ranks: int) -> StartedBy:
    """What started this process, which is one of `ranks` ranks."""
    alone = ranks == 1 or COMMAND in os.environ  # another launcher's command isn't known
    return StartedBy(command() if alone else "", os.environ.get("SLURM_JOB_ID", ""))


def read(run: Path) -> StartedBy:
    """What started the last attempt of the run; empty if nobody knows."""
    return read_valid_json(run / FILE_NAME, StartedBy) or StartedBy()
