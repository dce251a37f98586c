"""Dropout, which draws several elements at once on CPUs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def drop(x: Tensor, rate: float) -> Tensor:
    """Each element of `x` is zero with probability `rate`, and otherwise divided by 1 − `rate`."""
    if rate == 0.0 or x.device.type != "cpu" or x.dtype not in _BITS or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    return x * _dropout_mask(x, rate)


_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _dropout_mask(x: Tensor, rate: float) -> Tensor:
    """A tensor like `x`: 1 / (1 − rate) where an element is kept, else 0.

    On a CPU, PyTorch draws one Bernoulli variable at a time, which is a fifth of a step of GPT-2 in bf16. Here each
    64-bit draw serves two or four elements, as integers of their size. These are compared with the quantile of `rate`,
    to within 2^−16, and multiplied by the bits of 1 / (1 − rate).
    """
    integers = _BITS[x.dtype]
    values = 2 ** (8 * x.element_size())
    quantile = min(max(round(rate * values), 1), values - 1) - values // 2
    bits = torch.tensor(1 / (1 - rate), dtype=x.dtype).view(integers).item()
    draws = torch.empty(-(-x.nbytes // 8), dtype=torch.int64).random_(-(2**63), None)
    return draws.view(integers)[: x.numel()].ge_(quantile).mul_(bits).view(x.dtype).view(x.shape)
