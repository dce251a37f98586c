"""Memory that processes of a run share with everything else on the machine."""

import shutil
from pathlib import Path

from data_pipeline.foundation.memory import available
from launch.tools.doctor.findings import Finding, Settings

SHARED = Path("/dev/shm")
_RANK, _WORKER = 1.0e9, 0.4e9  # bytes of a rank of a small model, and of one of its loader processes
_SHARED_BY_RANK, _SHARED_BY_WORKER = 16 * 2**20, 8 * 2**20  # NCCL's buffers; batches on their way to the rank


def check(settings: Settings) -> list[Finding]:
    given = settings.ranks_here, settings.workers
    return [*memory(*given), *shared_memory(*given)]


def memory(ranks: int, workers: int) -> list[Finding]:
    """`ranks` of this machine, each with its loader `workers`. The model's own memory is what `pretrain plan` shows."""
    free, needed = available(), ranks * (_RANK + workers * _WORKER)
    found = f"{free / 1e9:.1f} GB free"
    processes = f"{needed / 1e9:.1f} GB for {ranks} × (1 rank + {workers} loaders), and the model"
    if free < needed / 2:
        return [Finding("memory", "fault", found, processes, "free some, or start fewer ranks or data.workers")]
    if free < needed:
        return [Finding("memory", "warning", found, processes, "free some, or start fewer ranks or data.workers")]
    return [Finding("memory", "ok", found)]


def shared_memory(ranks: int, workers: int) -> list[Finding]:
    needed = ranks * (_SHARED_BY_RANK + workers * _SHARED_BY_WORKER)
    expected = f"{needed / 1e6:.0f} MB or more for NCCL and loaders"
    remedy = "enlarge it: docker run --shm-size=8g or --ipc=host, mount -o remount,size=8g /dev/shm"
    if not SHARED.is_dir():
        return [Finding("shared memory", "fault", f"there is no {SHARED}", expected, remedy)]
    free = shutil.disk_usage(SHARED).free
    found = f"{free / 1e9:.1f} GB free" if free > 1e9 else f"{free / 1e6:.1f} MB free"
    if free < needed:
        return [Finding("shared memory", "fault", f"{found} in {SHARED}", expected, remedy)]
    return [Finding("shared memory", "ok", found)]
