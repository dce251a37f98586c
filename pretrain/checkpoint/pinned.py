"""Page-locked memory of exactly the size that is asked for.

PyTorch's allocator of page-locked memory rounds each block up to a power of two: 1.5 GB take 2.1 GB.
"""

import mmap
from typing import Any

import torch
from torch import Tensor

_SMALL = 2**20  # bytes: PyTorch's own allocator serves smaller tensors, of which there may be hundreds


class _Pages(mmap.mmap):
    """Pages of this process alone, which the GPU may read and write until they are freed."""

    _runtime: Any = None
    _address = 0

    def register(self, address: int, runtime: Any) -> None:
        """Locks the pages, which begin at `address`. Raises MemoryError where the system allows no more."""
        code = int(runtime.cudaHostRegister(address, len(self), 0))
        if code:
            raise MemoryError(f"cudaHostRegister: error {code} for {len(self):,} bytes (ulimit -l, memory of the node)")
        self._runtime, self._address = runtime, address

    def __del__(self) -> None:
        if self._address:
            self._runtime.cudaHostUnregister(self._address)


def pinned_like(like: Tensor, runtime: Any = None) -> Tensor:
    """An uninitialised tensor on the host with the shape and dtype of `like`, in page-locked memory.

    `runtime`: CUDA's, by default PyTorch's.
    """
    size = like.numel() * like.element_size()
    if size < _SMALL:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # else a write after a fork would move a page away from under the GPU
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=size)
    pages.register(tensor.data_ptr(), runtime or torch.cuda.cudart())
    return tensor.view(like.dtype).view(like.shape)
