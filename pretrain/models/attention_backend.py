"""Which implementation computes attention: what `compute.attention` asks for, or what suits the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["sdpa", "triton", "eager"]

WIDEST_HEAD = 256  # d_kv; the tiles of wider heads don't fit a GPU's registers
WIDEST_HEAD_IN_FP32 = 128
_backend: Backend | None = None


def use(backend: Backend | None) -> None:
    """From now on, attention in this process is computed by `backend`.

    - sdpa: PyTorch's `scaled_dot_product_attention`, with all biases and masks as its mask.
    - triton: `pretrain.kernels`, where they know the form of the mask; else sdpa. On GPUs alone.
    - eager: two products with a softmax between them.
    - None: the faster of sdpa and eager on a CPU, sdpa on a GPU.

    Layers that are compiled already keep what they were compiled for.
    """
    global _backend
    _backend = backend


@contextmanager
def using(backend: Backend | None) -> Iterator[None]:
    """`use` within the block."""
    before = _backend
    use(backend)
    try:
        yield
    finally:
        use(before)


def by_kernel(x: Tensor) -> bool:
    """Whether kernels of ours compute attention in the dtype of `x`."""
    return _backend == "triton" and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def takes_head(queries: Tensor) -> bool:
    """Whether these kernels compute heads as wide as those of `queries` (batch, heads, length, d_kv)."""
    return queries.size(3) <= (WIDEST_HEAD_IN_FP32 if queries.dtype == torch.float32 else WIDEST_HEAD)


def is_eager(queries: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """Whether attention that no kernel of ours computes is eager.

    On a CPU PyTorch's kernels take up to three times as long in bf16, and longer in fp32 with dropout or a bias that
    learns.
    """
    if _backend is not None or queries.device.type != "cpu":
        return _backend == "eager"
    learned = bias is not None and bias.requires_grad
    return queries.dtype == torch.bfloat16 or dropout > 0 or learned
