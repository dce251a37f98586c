"""Describes the environment of a run: versions, hardware, git commit and uncommitted changes."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import psutil
import torch

from data_pipeline.base.formatting import masked_code, without_login
from data_pipeline.base.packages import git, version_of
from pretrain.hardware import device_type
from pretrain.run import rank_environment
from pretrain.run.world import node_name

DIFF = "git.diff"
_PACKAGES = ("encdec-pretrain", "torch", "deepspeed", "ray", "sentencepiece", "mlflow", "transformers")


class Machine(TypedDict):
    """A node in environment.json, with the ranks on it. `cpu`: model, cores and memory_gb."""

    host: str
    cpu: dict[str, Any]
    gpus: list[str]
    versions: dict[str, str]
    ranks: list[int]


def describe(machines: list[Machine]) -> dict[str, Any]:
    """The environment of a run: the first of its `machines`, which has rank 0, and under "hosts" all machines with the
    versions that differ from the first."""
    here = machines[0]
    versions = here["versions"].items()
    return {
        **asdict(rank_environment.started_by(ranks := sum(len(one["ranks"]) for one in machines))),
        "versions": here["versions"],
        "host": here["host"],
        "ranks": ranks,
        "cpu": here["cpu"],
        "gpus": here["gpus"],
        "hosts": [{**one, "versions": dict(one["versions"].items() - versions)} for one in machines],
        "git": {"commit": git_commit(), "branch": git_branch(), "diff": git_diff()},
    }


def this_machine(*ranks: int) -> Machine:
    memory = round(psutil.virtual_memory().total / 1e9, 1)
    return {
        "host": node_name(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "memory_gb": memory},
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        if device_type() == "cuda"
        else [],
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
        "ranks": list(ranks),
    }


def machines(of_ranks: Sequence[Machine]) -> list[Machine]:
    """The machines of a run with their ranks, from the machine of each rank."""
    found: dict[str, Machine] = {}
    for machine in of_ranks:
        known = found.setdefault(machine["host"], machine)
        if known is not machine:
            known["ranks"] += machine["ranks"]
    return list(found.values())


def git_commit() -> str:
    """The commit of this source tree; empty for an installed package."""
    return git("rev-parse", "HEAD").strip()


def git_branch() -> str:
    """The branch of this source tree; empty for an installed package, and for a detached HEAD."""
    return git("symbolic-ref", "--short", "-q", "HEAD").strip()


def git_diff() -> str:
    """The uncommitted changes of this source tree, without secrets."""
    return masked_code(git("diff", "HEAD"))


def git_tags() -> dict[str, str]:
    """The state of this source tree under the names of MLflow's tags; {} for an installed package."""
    if not (commit := git_commit()):
        return {}
    tags = {
        "commit": commit,
        "branch": git_branch(),
        "repoURL": without_login(git("remote", "get-url", "origin").strip()),
        "dirty": str(bool(git("diff", "HEAD", "--name-only").strip())).lower(),
    }
    return {f"mlflow.source.git.{name}": value for name, value in tags.items() if value}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
