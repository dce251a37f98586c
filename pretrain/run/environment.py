"""The environment of a run: versions, hardware, git commit and uncommitted changes."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from data_pipeline.foundation.code_version import git

_PACKAGES = ("encdec-pretrain", "torch", "deepspeed", "ray", "webdataset", "sentencepiece", "mlflow", "transformers")


def describe(ranks: int) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "host": platform.node(),
        "ranks": ranks,
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        "git": {"commit": git_commit(), "diff": git("diff", "HEAD")},
    }


def git_commit() -> str:
    """The commit of this source tree; empty for an installed package."""
    return git("rev-parse", "HEAD").strip()


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
