"""The environment of a run: versions, hardware, git commit and uncommitted changes."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from data_pipeline.foundation.code_version import git
from data_pipeline.foundation.secrets import masked_code, without_login
from pretrain.run.hardware import device_type

DIFF = "git.diff"
_PACKAGES = ("encdec-pretrain", "torch", "deepspeed", "ray", "webdataset", "sentencepiece", "mlflow", "transformers")


def describe(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """The environment of a run: this machine, which has rank 0, and all `hosts` with the versions that differ there."""
    here = host()
    return {
        "versions": here["versions"],
        "host": here["host"],
        "ranks": sum(len(one["ranks"]) for one in hosts),
        "cpu": here["cpu"],
        "gpus": here["gpus"],
        "hosts": [_with_differences(one, here["versions"]) for one in hosts],
        "git": {"commit": git_commit(), "branch": git_branch(), "diff": git_diff()},
    }


def host() -> dict[str, Any]:
    """This machine."""
    return {
        "host": platform.node(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        if device_type() == "cuda"
        else [],
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _with_differences(host: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """`host` with those of its versions that aren't `versions`."""
    return {**host, "versions": dict(host["versions"].items() - versions.items())}


def hosts() -> list[dict[str, Any]]:
    """Every machine of the run with its ranks. All ranks call this together."""
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, host())
    found: dict[str, dict[str, Any]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault(machine["host"], {**machine, "ranks": []})["ranks"].append(rank)
    return list(found.values())


def git_commit() -> str:
    """The commit of this source tree; empty for an installed package."""
    return git("rev-parse", "HEAD").strip()


def git_branch() -> str:
    """The branch of this source tree; empty for an installed package, and for a commit checked out by itself."""
    return git("symbolic-ref", "--short", "-q", "HEAD").strip()


def git_diff() -> str:
    """What this source tree changes of its commit, without secrets."""
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
