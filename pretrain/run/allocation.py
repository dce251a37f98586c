"""How this process's C library hands out memory."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in <malloc.h>
_LARGEST = 1 << 30  # bytes: a block above this size is still mapped, and given back, on its own


def keep_freed_memory() -> None:
    """Freed memory stays with the process, for the next tensor of its size.

    By default glibc maps each block above 32 MB anew and gives it back when it is freed, so a model that trains on a
    CPU has its gradients of embeddings, logits and attention weights zeroed by the kernel, page by page, at each step.
    Does nothing under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST - 1)
