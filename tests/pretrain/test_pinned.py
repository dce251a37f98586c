"""Page-locked memory without a GPU: a stand-in for CUDA's runtime notes what is registered."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.engine_state import host_memory


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
    found = host_memory(3 * 2**19 + 1, True, runtime=runtime)
    assert found.shape == (3 * 2**19 + 1,)
    assert runtime.registered == {found.data_ptr(): 3 * 2**19 + 1}
    assert torch.equal(found.fill_(3), torch.full((3 * 2**19 + 1,), 3, dtype=torch.uint8))


def test_memory_is_unlocked_before_it_is_given_back():
    """Not while a view of it lives. The runtime is asked while the pages are still there."""
    runtime = Runtime()
    found = host_memory(2**22, True, runtime=runtime)
    part = found[5:7]
    del found
    gc.collect()
    assert len(runtime.registered) == 1
    part.fill_(1)
    del part
    gc.collect()
    assert runtime.registered == {}


def test_a_refusal_says_how_much_was_asked_for():
    with pytest.raises(MemoryError, match="4,194,304 bytes"):
        host_memory(2**22, True, runtime=Runtime(error=2))


def test_a_file_in_memory_is_used_even_if_its_pages_can_not_be_locked(tmp_path):
    found = host_memory(5000, True, tmp_path / "file", Runtime(error=2))
    found.fill_(7)
    assert (tmp_path / "file").read_bytes() == bytes([7]) * 5000
