"""Memory of this process: what is free for it, and the most that it takes during some work."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from data_pipeline.foundation.memory import available

_M_MMAP_THRESHOLD = -3  # malloc.h
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class DeviceMemory:
    """Of a CUDA device as PyTorch allocates it, or, on CPU, the machine's as resident in this process. All in bytes."""

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._held = self.held()

    def free(self) -> int:
        """What this rank may take besides what it holds; on CPU an equal share for each rank of the machine."""
        if self._cuda is None:
            return available() // int(os.environ.get("LOCAL_SIZE", "1"))
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
