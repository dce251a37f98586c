"""Checks all ranks together: the speed of an all-reduce, and DeepSpeed's numerics. Rank 0 returns the findings.

The environment of a rank has RANK etc., as in a run.
"""

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline.base.config_file import load
from launch.tools.doctor.checks import ALL_REDUCE, NUMERICS, Finding, Settings
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.engine.ranks import process_group
from pretrain.hardware import device_type, local_gpu
from pretrain.run.rank_environment import rank_environment

_LOOPS = 5
_SMALL, _LARGE = 2**20, {"cpu": 2**26, "cuda": 2**28}  # bytes
_SECONDS_OF_A_LOOP = 1.0  # about the maximum: on a slow network, less is sent


def all_reduce(settings: Settings) -> list[Finding]:
    """The speed of an all-reduce over all ranks."""
    kind, here = device_type(), rank_environment()
    device = torch.device(kind, local_gpu(here.local_rank, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=ALL_REDUCE.seconds))
    size, taken = _SMALL, _seconds(_SMALL, device)
    while size < _LARGE[kind] and 8 * taken < _SECONDS_OF_A_LOOP:
        size *= 4
        taken = _seconds(size, device)
    dist.barrier()
    dist.destroy_process_group()
    gpu = torch.cuda.get_device_name(device) if kind == "cuda" else None
    return [] if here.rank else [speed(settings.all_ranks, size, taken, gpu)]


def _seconds(size: int, device: torch.device) -> float:
    """The time of an all-reduce of `size` bytes on the slowest rank."""
    values, ranks = torch.ones(size // 4, device=device), dist.get_world_size()
    dist.all_reduce(values)
    if values[0].item() != ranks or values[-1].item() != ranks:
        raise SystemExit(f"the sum of {ranks} ones is {values[0].item():g}")
    begun = time.perf_counter()
    for _ in range(_LOOPS):
        dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - begun) / _LOOPS], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


def speed(ranks: int, size: int, seconds: float, gpu: str | None) -> Finding:
    """The bus bandwidth of an all-reduce of `size` bytes over n `ranks`, as in nccl-tests: 2(n-1)/n · size/time, which
    each rank sends in a ring. `gpu`: the name of the GPUs; None: on CPUs."""
    if ranks == 1:
        return Finding("all-reduce", "ok", f"one rank on {gpu or 'the CPU'}, so nothing is exchanged")
    reached = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    found = f"{ranks} ranks, {size / 2**20:.0f} MiB at {reached:.2g} GB/s ({gpu or 'CPU, gloo'})"
    return Finding("all-reduce", "ok", found)


def numerics(settings: Settings) -> list[Finding]:
    """Whether DeepSpeed trains a small model as a plain loop does, with the settings of a run of all ranks."""
    path, *overrides = settings.run_file
    config = load(Path(path), overrides, RunConfig)
    with process_group(1, NUMERICS.seconds, any_version=True) as (rank, _):
        # DeepSpeed chooses its accelerator when it is imported, which must be in the process group
        from pretrain.engine import numerics as zero_numerics
        from pretrain.engine import versions

        found = zero_numerics.compare(config, BatchPlan(config.batch, settings.all_ranks).usual_accumulation)
        untested = None if versions.is_tested() else versions.TESTED
        return [] if rank else [comparison(found.trained, found.wrong, untested)]


def comparison(trained: str, wrong: str, tested: str | None) -> Finding:
    """The finding about DeepSpeed's numerics. `tested`: the tested version, if another one is installed."""
    expected = "the weights of a plain loop, to the bit, after each step"
    if not wrong:
        return Finding("numerics", "ok", f"{trained}: {expected}")
    install = f"install deepspeed {tested} (constraints.txt)"
    remedy = install if tested else "don't train with these settings, and report this"
    return Finding("numerics", "error", f"{trained}: {wrong}", expected, remedy)
