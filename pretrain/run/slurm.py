"""Reads SLURM's environment variables: the rank of a process that srun started, nodes, and CPUs."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping

from data_pipeline.base.errors import UserError
from pretrain.run.rank_environment import number

_FIRST_PORT, _PORTS = 20000, 10000  # below Linux's ports for outgoing connections
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def disk_is_shared(nodes: int) -> bool:
    """True if nodes of the run, or of other jobs, may share the disk of the working directory."""
    return nodes > 1 or "SLURM_JOB_ID" in os.environ


def rank_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch.distributed and DeepSpeed need, from the variables of a task of srun. Empty without
    SLURM, and in an allocation for one task.

    The master is the first node of the step, and its port follows from the job's id, unless MASTER_ADDR and MASTER_PORT
    are given. Raises UserError for a process outside srun in an allocation for several tasks, where it would train
    alone.
    """
    tasks = (number(variables, name, 1) for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS") if name in variables)
    if all(one == 1 for one in tasks):
        return {}
    if not variables.get("SLURM_STEP_ID", "").isdecimal() or "SLURM_PROCID" not in variables:
        raise UserError(
            f"SLURM_NTASKS is {variables.get('SLURM_NTASKS')}, but srun has not started this process, so it would "
            "train alone; start the ranks with `launch slurm` or srun, or unset SLURM_NTASKS to train in one process"
        )
    master = variables.get("MASTER_ADDR")
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables.get("SLURM_STEP_NUM_TASKS") or variables["SLURM_NTASKS"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "LOCAL_SIZE": str(tasks_per_node(variables)[int(variables["SLURM_NODEID"])]),
        "MASTER_ADDR": master or node_address(hostnames(variables["SLURM_STEP_NODELIST"])[0]),
        "MASTER_PORT": variables.get("MASTER_PORT") or str(master_port(variables["SLURM_JOB_ID"])),
    }


def tasks_per_node(variables: Mapping[str, str]) -> list[int]:
    """The number of tasks on each node of a step."""
    return _counts(variables.get("SLURM_STEP_TASKS_PER_NODE") or variables["SLURM_TASKS_PER_NODE"])


def cpus_per_node(variables: Mapping[str, str]) -> list[int]:
    """The number of CPUs that a job has on each of its nodes; [] if SLURM doesn't say."""
    return _counts(variables.get("SLURM_JOB_CPUS_PER_NODE", ""))


def _counts(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]"""
    counts: list[int] = []
    for word in text.split(","):
        if match := _COUNT.fullmatch(word):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def master_port(job: str) -> int:
    """A port for the ranks of a job. Successive jobs get different ports."""
    return _FIRST_PORT + int(job) % _PORTS


def hostnames(nodes: str) -> list[str]:
    """The names of nodes in SLURM's short form, such as `node[01-03]`."""
    return _scontrol("show", "hostnames", nodes).split()


def node_address(node: str) -> str:
    """A name or address of `node` for other nodes: the name if the name resolves, else the address that SLURM has."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        known = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", node, "--oneliner"))
        return known[1] if known else node
    return node


def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError("scontrol is not on the PATH; it names the nodes of a SLURM job") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"scontrol {' '.join(arguments)}: {error.stderr.strip()}") from None
