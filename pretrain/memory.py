"""Memory of this process: what is free for it, and the most that it takes during some work."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

_M_MMAP_THRESHOLD = -3  # malloc.h
_GROUPS = {  # by controller: mount point, limit, what is taken of it, and which of that is given back when needed
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class DeviceMemory:
    """Of a CUDA device as PyTorch allocates it, or, on CPU, the machine's as resident in this process. All in bytes."""

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._held = self.held()

    def free(self) -> int:
        """What this rank may take besides what it holds; on CPU an equal share for each rank of the machine."""
        if self._cuda is None:
            available = min([psutil.virtual_memory().available, *left_by_control_groups()])
            return available // int(os.environ.get("LOCAL_SIZE", "1"))
        cached = torch.cuda.memory_reserved(self._cuda) - torch.cuda.memory_allocated(self._cuda)
        return torch.cuda.mem_get_info(self._cuda)[0] + cached

    def held(self) -> int:
        return resident() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    def peak(self, work: Callable[[], object]) -> int:
        """The most that is held during `work`, more than when this object was made."""
        if self._cuda is None:
            return peak_resident(work) - self._held
        torch.cuda.reset_peak_memory_stats(self._cuda)
        work()
        return torch.cuda.max_memory_allocated(self._cuda) - self._held


def left_by_control_groups(system: Path = Path("/")) -> Iterator[int]:
    """Bytes that each control group of this process with a limit, as a container's or a job's, leaves to take."""
    groups = (system / "proc/self/cgroup").read_text() if (system / "proc/self/cgroup").exists() else ""
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers not in _GROUPS:
            continue
        mounted, limit, usage, cache = _GROUPS[controllers]
        root = system / mounted
        own = root / path.lstrip("/")
        for group in (one for one in (own, *own.parents) if one.is_relative_to(root)):
            with contextlib.suppress(OSError, ValueError):  # in a container there is only the root; "max": no limit
                most, taken = (int((group / name).read_text()) for name in (limit, usage))
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most - taken + int(kinds.get(cache, 0))


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def give_back() -> None:
    """Has glibc give the system what is free of its memory: of what was freed it keeps much for itself."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)


def peak_resident(work: Callable[[], object]) -> int:
    """The most bytes of this process in memory during `work`, without what earlier work has left in free memory."""
    give_back()
    _CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident (man proc_pid_clear_refs)
    work()
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Gives blocks of a megabyte and more back to the system as soon as they are freed.

    glibc keeps what is up to 32 MB for itself once such a block was freed. Where what lasts is allocated between what
    doesn't, as shards between whole parameters, none of that is ever used again: a rank would hold twice a whole model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)  # glibc's alone
    mallopt(_M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # where it ends up by itself
