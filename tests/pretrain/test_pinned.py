"""Page-locked memory without a GPU: a stand-in for CUDA's runtime notes what is registered."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.pinned import pinned_like


class Runtime:
    def __init__(self, error: int = 0):
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0
        assert flags == 0
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        assert mapped(address)
        del self.registered[address]


def mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def test_no_more_is_locked_than_is_needed():
    """1.5 · 2²⁰ + 1 bytes: a power of two would be 2²¹."""
    runtime = Runtime()
    found = pinned_like(torch.empty(3 * 2**19 + 1, dtype=torch.uint8, device="meta"), runtime)
    assert runtime.registered == {found.data_ptr(): 3 * 2**19 + 1}
    matrix = pinned_like(torch.empty(1024, 513, dtype=torch.float32, device="meta"), runtime)
    assert (matrix.shape, matrix.dtype) == ((1024, 513), torch.float32)
    assert runtime.registered[matrix.data_ptr()] == 4 * 1024 * 513
    assert torch.equal(matrix.fill_(3.0), torch.full((1024, 513), 3.0))


def test_memory_is_unlocked_before_it_is_given_back():
    """Not while a view of it lives. The runtime is asked while the pages are still there."""
    runtime = Runtime()
    found = pinned_like(torch.empty(2**20, device="meta"), runtime)
    part = found[5:7]
    del found
    gc.collect()
    assert len(runtime.registered) == 1
    part.fill_(1.0)
    del part
    gc.collect()
    assert runtime.registered == {}


def test_a_refusal_says_how_much_was_asked_for():
    with pytest.raises(MemoryError, match="4,194,304 bytes"):
        pinned_like(torch.empty(2**20, device="meta"), Runtime(error=2))
