"""Measures the memory of this process: free bytes, and the peak of a piece of work. Tunes glibc's allocator."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from data_pipeline.base.processes import available_memory, total_memory
from pretrain.hardware import device_type
from pretrain.run.rank_environment import local_world_size

SAFE = 0.9  # share of the free memory to use: allocators waste some
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**30  # bytes: larger blocks are always mapped and returned on their own
_USUAL = 2**25  # bytes: the threshold that glibc ends up with by itself
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class DeviceMemory:
    """The memory of the device that a rank computes on, in bytes.

    On a CUDA device, this is the memory that PyTorch's allocator has taken, with the gaps between tensors. On a CPU it
    is the resident memory of the process.
    """

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._before = self.allocated()

    def free(self) -> int:
        """The memory that this rank may still allocate. On a CPU, the ranks of a machine have equal shares."""
        if self._cuda is None:
            return available_memory() // local_world_size()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._cuda)[0]

    def total(self) -> int:
        """The memory for this rank, free or not."""
        if self._cuda is None:
            return total_memory() // local_world_size()
        return torch.cuda.mem_get_info(self._cuda)[1]

    def allocated(self) -> int:
        if self._cuda is None:
            return _status("VmRSS")
        torch.cuda.empty_cache()  # cached memory is free for other tensors
        return torch.cuda.memory_reserved(self._cuda)

    def peak(self, work: Callable[[], object]) -> int:
        """The memory that `work` takes at its peak, beyond the memory that was allocated when this object was made."""
        if self._cuda is None:
            # glibc would otherwise keep most of the memory that earlier work has freed
            getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)(0)
            _CLEAR_REFS.write_text("5")  # resets the high-water mark (man proc_pid_clear_refs)
            work()
            return _status("VmHWM") - self._before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._cuda)
        work()
        return torch.cuda.max_memory_reserved(self._cuda) - self._before


def peak_memory(device: torch.device) -> int:
    """The peak memory of this rank so far, in bytes."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Within the block, glibc returns blocks of a megabyte and more to the system as soon as they are freed.

    By default, glibc keeps freed blocks of up to 32 MB. ZeRO-3 allocates lasting shards between whole parameters that
    are soon freed. The gaps between the shards would never be used again, and a rank would hold twice the whole model.
    """
    _mallopt(_M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST if device_type() == "cpu" else _USUAL)


def keep_freed_memory() -> None:
    """From now on, glibc keeps freed memory for the next tensor of its size. For ranks on a CPU.

    By default, glibc maps each block above 32 MB anew and returns it when it is freed. The kernel would then zero
    logits and gradients of embeddings page by page at every step.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
    _mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST - 1)


def _mallopt(option: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)(option, value)  # only glibc has it
