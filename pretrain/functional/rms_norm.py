"""`F.rms_norm` for CPUs. Like a GPU's kernel it keeps the input and a factor for each row.

On a CPU, PyTorch's is a chain of operations, which takes twice as long and keeps more. Here a few rows are taken at a
time, so that what passes between operations stays in a cache.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, gains: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε) · gains, for `x` (…, d_model) and gains (d_model,), computed in fp32, in the dtype of `x`."""
    result: Tensor = _RMSNorm.apply(x, gains, epsilon)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precision = torch.promote_types(x.dtype, torch.float32)
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
