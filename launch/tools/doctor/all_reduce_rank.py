"""One rank of the all-reduce that the doctor times, as a program.

RANK and the like are in its environment, as for a rank of a run, and the seconds that it may take. It reports when it
has joined the others, and rank 0 reports what was measured.
"""

import json
import os
import signal
import time
from datetime import timedelta

from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.findings import REQUEST

_LOOPS = 5
_SMALL, _LARGE = 2**20, {"cpu": 2**26, "cuda": 2**28}  # bytes
_SECONDS_OF_A_LOOP = 1.0  # at most, about: on a slow network less is sent


def main(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)  # ends this process wherever it waits
    import torch  # after the timer, since a slow file system makes it hang
    import torch.distributed as dist

    from pretrain.run.hardware import device_type, local_gpu

    kind = device_type()
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(kind, local_gpu(local, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=seconds))

    def timed(size: int) -> float:
        """Seconds of an all-reduce of `size` bytes, by the slowest rank."""
        values = torch.ones(size // 4, device=device)
        dist.all_reduce(values)
        if values[0].item() != ranks or values[-1].item() != ranks:
            raise SystemExit(f"rank {rank}: the sum of {ranks} ones is {values[0].item():g}")
        begun = time.perf_counter()
        for _ in range(_LOOPS):
            dist.all_reduce(values)
        if kind == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([(time.perf_counter() - begun) / _LOOPS], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    size, taken = _SMALL, timed(_SMALL)
    print(PROGRAM_REPORT, json.dumps({"joined": rank}), flush=True)
    while size < _LARGE[kind] and 8 * taken < _SECONDS_OF_A_LOOP:
        size *= 4
        taken = timed(size)
    if rank == 0:
        gpu = torch.cuda.get_device_name(device) if kind == "cuda" else None
        print(PROGRAM_REPORT, json.dumps({"bytes": size, "seconds": taken, "gpu": gpu}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(os.environ[REQUEST]))
