"""Checks all ranks together: the speed of an all-reduce. Rank 0 returns the findings.

The environment of a rank has RANK etc., as in a run.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from launch.tools.doctor.checks import ALL_REDUCE, Finding, Settings
from pretrain.hardware import device_type, local_gpu
from pretrain.run.rank_environment import rank_environment

_LOOPS = 5
_BYTES = {"cpu": 2**26, "cuda": 2**28}


def all_reduce(settings: Settings) -> list[Finding]:
    """The speed of an all-reduce over all ranks."""
    kind, here = device_type(), rank_environment()
    device = torch.device(kind, local_gpu(here.local_rank, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=ALL_REDUCE.seconds))
    taken = _seconds(_BYTES[kind], device)
    dist.barrier()
    dist.destroy_process_group()
    gpu = torch.cuda.get_device_name(device) if kind == "cuda" else None
    return [] if here.rank else [speed(settings.all_ranks, _BYTES[kind], taken, gpu)]


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
