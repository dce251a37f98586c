"""Products of matrices in bf16, also on CPUs that have no arithmetic for it.

There PyTorch multiplies bf16 at a tenth to a seventieth of its speed in fp32 (AMD EPYC 7003: 1 to 9 GFLOP/s on a core
instead of 80). Here the operands become fp32, and each sum is rounded once: the same as where the CPU multiplies bf16,
which also sums in fp32. The plain forms are `F.linear` and `@`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# True if PyTorch has fast products of bf16 on this CPU.
MULTIPLIES_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x (…, inputs) · weightᵀ (outputs, inputs) + bias (outputs,) → (…, outputs)."""
    return _Widened.apply(x, weight, bias) if _widened(x) else F.linear(x, weight, bias)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """left (…, n, k) @ right (…, k, m) → (…, n, m)."""
    return _Widened.apply(left, right.mT, None) if _widened(left) else left @ right


def addmm(summand: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """beta · summand + alpha · (left @ right), for matrices or batches of matrices. Without gradients."""
    function = torch.addmm if left.dim() == 2 else torch.baddbmm
    if not _widened(left):
        return function(summand, left, right, beta=beta, alpha=alpha)
    return function(summand.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(left.dtype)


def _widened(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not MULTIPLIES_BF16


class _Widened(torch.autograd.Function):
    """x (…, n, k) · weightᵀ (…, m, k) + bias (m,), in fp32. What the backward pass reads is kept as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        wide, matrix = x.float(), weight.float()
        found = wide @ matrix.mT if weight.dim() > 2 else F.linear(wide, matrix, bias if bias is None else bias.float())
        return found.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ weight.float()).sum_to_size(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            wide = x.float()
            if weight.dim() == 2:
                gradient, wide = gradient.flatten(0, -2), wide.flatten(0, -2)
            grad_weight = (gradient.mT @ wide).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.biased and ctx.needs_input_grad[2]:
            grad_bias = gradient.flatten(0, -2).sum(dim=0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias
