"""One machine: installed packages, GPUs, and memory that a run shares with everything else there."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pynvml
from packaging.requirements import Requirement

from data_pipeline.foundation.code_version import PACKAGE
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.memory import available
from launch.tools.doctor.findings import Finding, Level, Settings
from pretrain.hardware.cpu_speed import product_flops
from pretrain.hardware.machine import ACCELERATOR, VISIBLE, count_gpus, cpu_multiplies_bf16, threads_per_rank

_INSTALL = "install the versions of constraints.txt: pip install -c constraints.txt"
_BUSY = 2**30  # bytes
_SHARED = Path("/dev/shm")
_RANK, _WORKER = 1.0e9, 0.4e9  # bytes of a rank of a small model, and of one of its loader processes
_SHARED_BY_RANK, _SHARED_BY_WORKER = 16 * 2**20, 8 * 2**20  # NCCL's buffers; batches on their way to the rank


def versions(settings: Settings) -> list[Finding]:
    """The installed packages against what this project declares."""
    try:
        declared = metadata(PACKAGE).get_all("Requires-Dist") or []
    except PackageNotFoundError:
        found = f"{PACKAGE} isn't installed, so nothing says what it needs"
        return [Finding("versions", "warning", found, "", _INSTALL)]
    wrong = []
    for needed in map(Requirement, declared):
        number = _version(needed.name)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        if not (number and needed.specifier.contains(number, prereleases=True)):
            found = f"{needed.name} {number or 'is missing'}"
            expected = f"{needed.name} {needed.specifier}".strip()
            wrong.append(Finding("versions", "fault", found, expected, _INSTALL))
    numbers = (f"{name} {_version(name)}" for name in (PACKAGE, "torch", "deepspeed", "mlflow"))
    return wrong or [Finding("versions", "ok", ", ".join([f"python {platform.python_version()}", *numbers]))]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def gpus(settings: Settings) -> list[Finding]:
    """Whether each rank has a GPU, all are of one kind, and nobody else uses them."""
    number, ranks = count_gpus(), settings.ranks_here
    if number == 0:
        chosen = " and ".join(f"{name}={os.environ[name]}" for name in (ACCELERATOR, VISIBLE) if name in os.environ)
        bf16 = "bf16" if cpu_multiplies_bf16() else "no bf16 (precision: fp32)"
        has = f"{counted(threads_per_rank(1), 'core')}, {product_flops() / 1e9:,.0f} GFLOP/s in fp32 products, {bf16}"
        return [Finding("GPUs", "ok", f"none{f' with {chosen}' if chosen else ''}; ranks run on the CPU: {has}")]
    if ranks > number:
        return [Finding("GPUs", "fault", f"{number}", f"{ranks}, one for each rank", "ask for fewer ranks")]
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
    kinds = sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles})
    findings = [Finding("GPUs", "ok", f"{len(handles)} × {' and '.join(kinds)}")]
    if len(kinds) > 1:
        findings = [Finding("GPUs", "warning", findings[0].found, "GPUs of one kind", "the slowest sets the pace")]
    used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
    if busy := [str(place) for place, amount in enumerate(used) if amount > _BUSY]:
        found = f"GPUs {', '.join(busy)}: up to {max(used) / 1e9:,.1f} GB in use"
        remedy = "see who uses them with nvidia-smi, and end that"
        findings.append(Finding("GPU memory", "warning", found, "free GPUs", remedy))
    return findings


def memory(settings: Settings) -> list[Finding]:
    """What is free for the ranks and their loaders. The model's own memory is what `pretrain plan` shows."""
    ranks, workers = settings.ranks_here, settings.workers
    free, needed = available(), ranks * (_RANK + workers * _WORKER)
    findings = [Finding("memory", "ok", f"{free / 1e9:.1f} GB free")]
    if free < needed:
        expected = f"{needed / 1e9:.1f} GB for {ranks} × (1 rank + {workers} loaders), and the model"
        remedy = "free some, or start fewer ranks or data.workers"
        level: Level = "fault" if free < needed / 2 else "warning"
        findings = [Finding("memory", level, findings[0].found, expected, remedy)]
    needed = ranks * (_SHARED_BY_RANK + workers * _SHARED_BY_WORKER)
    free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else 0
    found = f"{free / 1e9:.1f} GB free" if free > 1e9 else f"{free / 1e6:.1f} MB free"
    if free >= needed:
        return [*findings, Finding("shared memory", "ok", found)]
    expected = f"{needed / 1e6:.0f} MB or more for NCCL and loaders"
    remedy = "enlarge it: docker run --shm-size=8g or --ipc=host, mount -o remount,size=8g /dev/shm"
    return [*findings, Finding("shared memory", "fault", f"{found} in {_SHARED}", expected, remedy)]
