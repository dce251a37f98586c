"""The sizes of tiles: a fixed choice for each kernel, or the fastest of some, measured on the GPU at hand."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pretrain.kernels import compilation

Result = TypeVar("Result")
FIXED = "ENCDEC_FIXED_TILES"  # of the environment: with it, nothing is measured in this process and its children


class Tiles(NamedTuple):
    """Rows and columns of the logits that a program holds at a time, its warps, and the depth of its prefetching."""

    rows: int
    columns: int
    warps: int
    stages: int


# First comes the fixed choice, which fits an A100's and an H100's shared memory in bf16 at 64 numbers a head. None
# spills registers there (docs/results/attention-on-gpus.md), as 128 × 128 would in the backward pass.
_CHOICES = {
    "forward": [Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3)],
    "backward_queries": [Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 3)],
    "backward_keys": [Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 3)],
    "backward_diagonals": [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 8, 3)],
}
# Heads of more than 64 numbers take twice the memory and registers, and those of more than 128 four times; fp32 has no
# tensor cores besides.
_CHOICES_OF_WIDE_HEADS = {
    "forward": [Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2)],
    "backward_queries": [Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 2)],
    "backward_keys": [Tiles(64, 64, 8, 2)],
    "backward_diagonals": [Tiles(32, 32, 4, 2)],
}
_CHOICES_OF_WIDEST_HEADS = {
    "forward": [Tiles(64, 32, 8, 2), Tiles(64, 64, 8, 2)],
    "backward_queries": [Tiles(64, 32, 8, 2)],
    "backward_keys": [Tiles(32, 32, 8, 2)],
    "backward_diagonals": [Tiles(32, 32, 8, 2)],
}
_CHOICES_OF_FP32 = [Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 1)]
_chosen: dict[tuple, Tiles] = {}


def choices(kernel: str, dtype: torch.dtype, d_kv: int) -> list[Tiles]:
    """The tiles worth trying, the fixed choice first."""
    if dtype == torch.float32:
        return _CHOICES_OF_FP32
    if d_kv > 128:
        return _CHOICES_OF_WIDEST_HEADS[kernel]
    return (_CHOICES_OF_WIDE_HEADS if d_kv > 64 else _CHOICES)[kernel]


def fastest(kernel: str, like: Tensor, key: tuple, launch: Callable[[Tiles], Result]) -> Result:
    """What `launch` returns with the tiles that are fastest for `key`, measured on its first use.

    Other tiles sum in another order and change last bits. So the choice is fixed where PyTorch is asked for
    deterministic algorithms, and where the environment has FIXED.
    """
    tiles, *others = choices(kernel, like.dtype, like.size(-1))
    if others and _measures(like):
        where = kernel, key, like.device
        if where in _chosen:
            tiles = _chosen[where]
        elif compilation.is_recording():
            for other in others:
                launch(other)
        else:
            tiles = _chosen[where] = min([tiles, *others], key=lambda one: _milliseconds(launch, one))
    return launch(tiles)


def _measures(like: Tensor) -> bool:
    return like.is_cuda and FIXED not in os.environ and not torch.are_deterministic_algorithms_enabled()


def _milliseconds(launch: Callable[[Tiles], object], tiles: Tiles) -> float:
    from triton.runtime.errors import OutOfResources, PTXASError  # triton.testing imports more than kernels need
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(tiles), warmup=5, rep=20, return_mode="median")
    except (OutOfResources, PTXASError, torch.OutOfMemoryError):  # the last: of the buffer that clears the cache
        compilation.failed()
        return float("inf")
