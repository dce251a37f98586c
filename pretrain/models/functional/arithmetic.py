"""Arithmetic: the precision and the bounds of numbers, their copies between the host and a device, and operations for
which PyTorch's own are slow on CPUs: dropout and RMS norms. Their plain forms are `F.dropout` and `F.rms_norm`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def at_least_fp32(x: Tensor) -> torch.dtype:
    """fp32, or the dtype of `x` where that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap) (Gemma 2, section 2): nearly the identity for small logits, and never beyond ±cap.

    Without a cap, the logits as they are.
    """
    return logits if cap is None else cap * torch.tanh(logits / cap)


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on `device`, through page-locked memory: the host doesn't wait for the copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class OnHost:
    """The values that `tensor` has now, for later. The host doesn't wait for their copy until it asks for them."""

    def __init__(self, tensor: Tensor):
        self._copy = tensor.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> list:
        """Waits for the copy, if the device hasn't got that far."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()


def drop(x: Tensor, rate: float) -> Tensor:
    """Each element of `x` is zero with probability `rate`, and otherwise divided by 1 − `rate`."""
    if rate == 0.0 or x.device.type != "cpu" or x.dtype not in _BITS or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    return x * _dropout_mask(x, rate)


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


def rms_norm(x: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · gains, for `x` (…, d_model) and gains (d_model,), computed in fp32, in the dtype of `x`.

    Like a GPU's kernel it keeps the input and a factor for each row. PyTorch's on a CPU is a chain of operations, which
    takes twice as long and keeps more. Here a few rows are taken at a time, so that what passes between operations
    stays in a cache.
    """
    return _RMSNorm.apply(x, gains, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precision = at_least_fp32(x)
        flat, gains = x.flatten(0, -2), weight.to(precision)
        out = torch.empty_like(flat)
        factors = flat.new_empty(len(flat), 1, dtype=precision)
        for part, factor, into in _in_cache(flat, factors, out):
            rows = part.to(precision, copy=True)
            mean_square = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(x.size(-1))
            factor.copy_(mean_square.add_(epsilon).rsqrt_())
            into.copy_(rows.mul_(factor).mul_(gains))
        ctx.save_for_backward(x, weight, factors)
        return out.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x · factor: dL/dx = factor · (g w − n · mean(g w n)), dL/dw = Σ g n"""
        x, weight, factors = ctx.saved_tensors
        flat, gains = x.flatten(0, -2), weight.to(factors.dtype)
        out, grad_weight = torch.empty_like(flat), torch.zeros_like(gains)
        for part, factor, along, into in _in_cache(flat, factors, gradient.flatten(0, -2), out):
            normed = part * factor
            rows = along.to(normed.dtype, copy=True)
            products = rows * normed
            grad_weight += products.sum(dim=0)
            means = torch.mv(products, gains).div_(x.size(-1))
            into.copy_(rows.mul_(gains).addcmul_(normed, means[:, None], value=-1).mul_(factor))
        return out.view_as(x), grad_weight.to(weight.dtype), None


def _in_cache(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The same rows of each of `tensors` (rows, …), as many at a time as a cache holds in fp32 several times.

    All at once where a compiler fuses the operations anyway; none on the meta device, where nothing is computed.
    """
    if tensors[0].is_meta:
        return []
    step = max(1, len(tensors[0]) if torch.compiler.is_compiling() else (1 << 16) // tensors[0].size(-1))
    return list(zip(*(tensor.split(step) for tensor in tensors), strict=True))
