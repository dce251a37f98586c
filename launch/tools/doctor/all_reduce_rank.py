"""One rank of the all-reduce that the doctor times, as a program.

RANK and the like are in its environment, as for a rank of a run, the ranks of each node, and the seconds that it may
take. It reports when it has joined the others, and rank 0 reports what was measured. Of several nodes, each is then
measured alone, and of more than two each with its neighbour: the first rank of such a group reports that.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import accumulate

from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.findings import REQUEST

_LOOPS = 5
_SMALL, _LARGE = 2**20, {"cpu": 2**26, "cuda": 2**28}  # bytes
_SECONDS_OF_A_LOOP = 1.0  # at most, about: on a slow network less is sent


def rounds(per_node: list[int]) -> Iterator[list[list[int]]]:
    """Groups of neighbouring nodes, by their numbers, that are measured at the same time since they share no link: each
    node with several ranks alone, then pairs. Two nodes are a pair that the sum over all ranks has measured.

    >>> [*rounds([8, 8, 8])]
    [[[0], [1], [2]], [[0, 1]], [[1, 2]]]
    """
    nodes = range(len(per_node))
    if len(nodes) > 1 and any(ranks > 1 for ranks in per_node):
        yield [[node] for node in nodes if per_node[node] > 1]
    if len(nodes) > 2:
        yield from ([[node, node + 1] for node in nodes[first:-1:2]] for first in (0, 1))


def main(seconds: float, per_node: list[int]) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process wherever it waits
    import torch  # after the timer, since a slow file system makes it hang
    import torch.distributed as dist

    from pretrain.hardware.machine import device_type, local_gpu

    kind = device_type()
    rank, local = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    device = torch.device(kind, local_gpu(local, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=seconds))

    def timed(size: int, group: dist.ProcessGroup | None = None) -> float:
        """Seconds of an all-reduce of `size` bytes over a group, by the slowest rank."""
        values, members = torch.ones(size // 4, device=device), dist.get_world_size(group)
        dist.all_reduce(values, group=group)
        if values[0].item() != members or values[-1].item() != members:
            raise SystemExit(f"rank {rank}: the sum of {members} ones is {values[0].item():g}")
        begun = time.perf_counter()
        for _ in range(_LOOPS):
            dist.all_reduce(values, group=group)
        if kind == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([(time.perf_counter() - begun) / _LOOPS], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return float(slowest.item())

    size, taken = _SMALL, timed(_SMALL)
    print(PROGRAM_REPORT, json.dumps({"joined": rank}), flush=True)
    while size < _LARGE[kind] and 8 * taken < _SECONDS_OF_A_LOOP:
        size *= 4
        taken = timed(size)
    if rank == 0:
        gpu = torch.cuda.get_device_name(device) if kind == "cuda" else None
        print(PROGRAM_REPORT, json.dumps({"bytes": size, "seconds": taken, "gpu": gpu}), flush=True)
    firsts = [0, *accumulate(per_node)]
    for groups in rounds(per_node):
        mine = None
        for nodes in groups:
            members = range(firsts[nodes[0]], firsts[nodes[-1] + 1])
            group = dist.new_group([*members])  # all ranks must call it
            if rank in members:
                mine = nodes, group
        dist.barrier()
        if mine is not None:
            taken = timed(size, mine[1])
            if rank == firsts[mine[0][0]]:
                print(PROGRAM_REPORT, json.dumps({"nodes": mine[0], "bytes": size, "seconds": taken}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*json.loads(os.environ[REQUEST]))
