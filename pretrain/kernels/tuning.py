"""The sizes of tiles: a fixed choice for each kernel, or the fastest of some, measured on the GPU at hand."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Tiles(NamedTuple):
    """Rows and columns of the logits that a program holds at a time, its warps, and the depth of its prefetching."""

    rows: int
    columns: int
    warps: int
    stages: int


# The first of each is the fixed choice; it fits an A100's and an H100's shared memory in bf16 at 64 numbers a head.
_CHOICES = {
    "forward": [Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3)],
    "backward_queries": [Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2)],
    "backward_keys": [Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2)],
    "backward_diagonals": [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 3), Tiles(128, 128, 8, 2)],
}
# Heads of more than 64 numbers take twice the memory and registers; fp32 has no tensor cores besides.
_CHOICES_OF_WIDE_HEADS = {
    "forward": [Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2)],
    "backward_queries": [Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 2)],
    "backward_keys": [Tiles(64, 64, 8, 2), Tiles(32, 64, 4, 2)],
    "backward_diagonals": [Tiles(64, 64, 8, 2), Tiles(32, 32, 4, 2)],
}
_CHOICES_OF_FP32 = [Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1)]
_chosen: dict[tuple, Tiles] = {}


def choices(kernel: str, dtype: torch.dtype, d_kv: int) -> list[Tiles]:
    """The tiles worth trying, the fixed choice first."""
    if dtype == torch.float32:
        return _CHOICES_OF_FP32
    return (_CHOICES_OF_WIDE_HEADS if d_kv > 64 else _CHOICES)[kernel]


def fastest(kernel: str, like: Tensor, key: tuple, launch: Callable[[Tiles], Result]) -> Result:
    """What `launch` returns with the tiles that are fastest for `key`, measured on its first use.

    Other tiles sum in another order and change last bits. So the choice is fixed where PyTorch is asked for
    deterministic algorithms.
    """
    tiles, *others = choices(kernel, like.dtype, like.size(-1))
    if others and like.is_cuda and not torch.are_deterministic_algorithms_enabled():
        where = kernel, key, like.device
        if where not in _chosen:
            _chosen[where] = min([tiles, *others], key=lambda one: _milliseconds(launch, one))
        tiles = _chosen[where]
    return launch(tiles)


def _milliseconds(launch: Callable[[Tiles], object], tiles: Tiles) -> float:
    from triton.runtime.errors import OutOfResources, PTXASError  # triton.testing imports more than kernels need
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(tiles), warmup=5, rep=20, return_mode="median")
    except (OutOfResources, PTXASError, torch.OutOfMemoryError):  # the last: of the buffer that clears the cache
        return float("inf")
