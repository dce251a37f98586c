"""What ranks check together: sums over all of them, and how DeepSpeed trains. Rank 0 has the findings.

RANK and the like are in a rank's environment, as for a rank of a run.
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline.foundation.config_file import load
from launch.tools.doctor.checks import ALL_REDUCE, NUMERICS
from launch.tools.doctor.findings import Finding, Settings
from pretrain.config import RunConfig
from pretrain.hardware.gpus import gpu_of_device
from pretrain.hardware.machine import VISIBLE, device_type, local_gpu

_LOOPS = 5
_SMALL, _LARGE = 2**20, {"cpu": 2**26, "cuda": 2**28}  # bytes
_SECONDS_OF_A_LOOP = 1.0  # at most, about: on a slow network less is sent
_SHARE = 0.5  # of what the data sheet gives, or other nodes; NCCL's own tests reach about 0.8 of the former


def all_reduce(settings: Settings) -> list[Finding]:
    """How fast all ranks sum, and which nodes, and pairs of neighbours, are slower than the others."""
    kind, rank, local = device_type(), int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local_gpu(local, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=ALL_REDUCE.seconds))
    size, taken = _SMALL, _seconds(_SMALL, device)
    while size < _LARGE[kind] and 8 * taken < _SECONDS_OF_A_LOOP:
        size *= 4
        taken = _seconds(size, device)
    firsts, speeds = [0, *accumulate(settings.per_node)], {}
    for parts in rounds(settings.per_node):
        measured = torch.zeros(len(parts), device=device)
        members = [range(firsts[nodes[0]], firsts[nodes[-1] + 1]) for nodes in parts]
        groups = [dist.new_group([*ranks]) for ranks in members]  # all ranks must call it
        for number, (ranks, group) in enumerate(zip(members, groups, strict=True)):
            if rank in ranks:
                measured[number] = bus_bandwidth(len(ranks), size, _seconds(size, device, group))
        dist.all_reduce(measured, dist.ReduceOp.MAX)
        speeds |= zip(parts, measured.tolist(), strict=True)
    dist.barrier()
    dist.destroy_process_group()
    gpu = torch.cuda.get_device_name(device) if kind == "cuda" else None
    return [] if rank else [over_all_ranks(settings, size, taken, gpu), *slow_parts(settings.nodes, speeds)]


def rounds(per_node: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Groups of neighbouring nodes, by their numbers, that are measured at the same time since they share no link: each
    node with several ranks alone, then pairs. Two nodes are a pair that the sum over all ranks has measured.

    >>> [*rounds([8, 8, 8])]
    [[(0,), (1,), (2,)], [(0, 1)], [(1, 2)]]
    """
    nodes = range(len(per_node))
    if len(nodes) > 1 and any(ranks > 1 for ranks in per_node):
        yield [(node,) for node in nodes if per_node[node] > 1]
    if len(nodes) > 2:
        yield from ([(node, node + 1) for node in nodes[first:-1:2]] for first in (0, 1))


def _seconds(size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Of an all-reduce of `size` bytes over a group, by the slowest rank."""
    values, members = torch.ones(size // 4, device=device), dist.get_world_size(group)
    dist.all_reduce(values, group=group)
    if values[0].item() != members or values[-1].item() != members:
        raise SystemExit(f"the sum of {members} ones is {values[0].item():g}")
    begun = time.perf_counter()
    for _ in range(_LOOPS):
        dist.all_reduce(values, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - begun) / _LOOPS], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest.item())


def over_all_ranks(settings: Settings, size: int, seconds: float, gpu: str | None) -> Finding:
    """Of an all-reduce of `size` bytes over all ranks. `gpu`: the name of the GPUs; None: on CPUs."""
    ranks, nodes = settings.all_ranks, len(settings.nodes)
    if ranks == 1:
        return Finding("all-reduce", "ok", f"one rank on {gpu or 'the CPU'}, so nothing is exchanged")
    speed, expected = bus_bandwidth(ranks, size, seconds), expected_bandwidth(gpu, settings.per_node)
    found = f"{ranks} ranks, {size / 2**20:.0f} MiB at {speed:.2g} GB/s ({gpu or 'CPU, gloo'})"
    if expected and speed < _SHARE * expected:
        where = "the network (NCCL_DEBUG=INFO shows what NCCL uses)" if nodes > 1 else "nvidia-smi topo -m"
        sheet = f"about {expected:.3g} GB/s by the data sheet"
        return Finding("all-reduce", "warning", found, sheet, f"look at {where}")
    return Finding("all-reduce", "ok", found + (f" of {expected:.3g} GB/s by the data sheet" if expected else ""))


def slow_parts(names: Sequence[str], speeds: dict[tuple[int, ...], float]) -> Iterator[Finding]:
    """Warnings of nodes, and of pairs of neighbours, that are less than half as fast as the fastest of their kind.

    `speeds`: GB/s, by the numbers of the nodes.
    """
    for nodes, speed in speeds.items():
        fastest = max(other for others, other in speeds.items() if len(others) == len(nodes))
        if speed < _SHARE * fastest:
            where = (
                f"between {' and '.join(names[n] for n in nodes)}" if len(nodes) > 1 else f"within {names[nodes[0]]}"
            )
            remedy = "network cards, cables and switch ports (ibstat)" if len(nodes) > 1 else "nvidia-smi topo -m there"
            expected = f"about {fastest:.2g} GB/s, as elsewhere"
            yield Finding("all-reduce", "warning", f"{speed:.2g} GB/s {where}", expected, f"look at {remedy}")


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """nccl-tests' bus bandwidth, 2(n-1)/n · size/time: GB/s that each rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def expected_bandwidth(gpu: str | None, per_node: Sequence[int]) -> float | None:
    """The bus bandwidth that the links allow, GB/s; None for CPUs and unknown GPUs.

    Between nodes, the ring of each GPU goes through that GPU's own network card.
    """
    known = gpu_of_device(gpu) if gpu else None
    if known is None:
        return None
    links = [known.link] if max(per_node) > 1 else []
    return min([*links, *([known.network * min(per_node)] if len(per_node) > 1 else [])])


def numerics(settings: Settings) -> list[Finding]:
    """Whether DeepSpeed trains a small model as a plain loop does, with the settings of a run of all ranks."""
    from pretrain.zero.ranks import process_group  # of DeepSpeed's settings, which all_reduce doesn't need

    path, *overrides = settings.run_file
    config = load(Path(path), overrides, RunConfig)
    with process_group(1, NUMERICS.seconds, any_version=True) as (rank, _):
        from pretrain.zero import deepspeed_private, numerics  # DeepSpeed chooses its accelerator when it is imported

        found = numerics.compare(config, config.batch.accumulation(settings.all_ranks))
        tested, used = deepspeed_private.TESTED_VERSION, deepspeed_private.deepspeed.__version__
        return [] if rank else [comparison(found.trained, found.wrong, tested if used != tested else None)]


def comparison(trained: str, wrong: str, tested: str | None) -> Finding:
    """Of DeepSpeed's training. `tested`: its tested version if it is another one."""
    expected = "the weights of a plain loop, to the bit, after each step"
    if not wrong:
        return Finding("numerics", "ok", f"{trained}: {expected}")
    remedy = (
        f"install deepspeed {tested} (constraints.txt)"
        if tested
        else "don't train with these settings, and report this"
    )
    return Finding("numerics", "fault", f"{trained}: {wrong}", expected, remedy)
