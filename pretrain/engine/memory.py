"""Memory of this process: free bytes, and the peak during a block of code."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline.foundation.processes import available_memory, total_memory
from pretrain.hardware import device_type
from pretrain.run.rank_environment import local_world_size

SAFE = 0.9  # share of the free memory to use: allocators waste some
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**30  # bytes: a block above this size is always mapped, and given back, on its own
_USUAL = 2**25  # where glibc's own adjustment of this size ends up
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class DeviceMemory:
    """Memory of the device that a rank computes on, in bytes.

    On a CUDA device it counts what PyTorch's allocator has taken, with the gaps between tensors; on a CPU the process's
    resident memory.
    """

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._before = self.allocated()

    def free(self) -> int:
        """How much more this rank may allocate. On a CPU, the ranks of a machine have equal shares."""
        if self._cuda is None:
            return available_memory() // local_world_size()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._cuda)[0]

    def total(self) -> int:
        """How much memory there is for this rank, free or not."""
        if self._cuda is None:
            return total_memory() // local_world_size()
        return torch.cuda.mem_get_info(self._cuda)[1]

    def allocated(self) -> int:
        if self._cuda is None:
            return _status("VmRSS")
        torch.cuda.empty_cache()  # what is cached may be used again for anything
        return torch.cuda.memory_reserved(self._cuda)

    def peak(self, work: Callable[[], object]) -> int:
        """How much memory `work` takes at its peak, beyond what was allocated when this object was made."""
        if self._cuda is None:
            # glibc would otherwise keep most of what earlier work has freed
            getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)
            _CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident (man proc_pid_clear_refs)
            work()
            return _status("VmHWM") - self._before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._cuda)
        work()
        return torch.cuda.max_memory_reserved(self._cuda) - self._before


def peak_memory(device: torch.device) -> int:
    """The peak memory of a rank so far, in bytes, of the rank with the highest. All ranks call it."""
    cuda = device.type == "cuda"
    peak = torch.tensor(torch.cuda.max_memory_reserved(device) if cuda else _status("VmHWM"), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Within the block, glibc returns blocks of a megabyte and more to the system as soon as they are freed.

    By default glibc keeps freed blocks of up to 32 MB. ZeRO-3 allocates lasting shards between whole parameters that
    are soon freed, and the gaps between the shards are never used again: a rank would hold twice the whole model.
    """
    _mallopt(_M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST if device_type() == "cpu" else _USUAL)


def keep_freed_memory() -> None:
    """From now on glibc keeps freed memory for the next tensor of its size. For ranks on a CPU.

    By default it maps each block above 32 MB anew and returns it when it is freed. Where a model trains on a CPU, the
    kernel then zeroes its logits and the gradients of its embeddings page by page at every step.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    _mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1)


def _mallopt(option: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)(option, value)  # only glibc has it
