"""The losses of the logits x · weightᵀ + bias, of which only a chunk exists at a time: what GPUs need.

Compiled, the loss and its gradient read and write few bytes, so that a kernel of our own could save little. A logit in
bf16 takes 2 bytes. The compiled forward pass reads it twice, for the greatest of a row and for the sum; the compiled
backward pass reads it and writes its gradient: 8 bytes, of which a kernel with a running maximum would spare 2. T5 v1.1
base has 469 million logits for 128 rows of 114 targets: 0.9 GB more, 0.3 ms at the 3.35 TB/s of an H100, where the
products of the step take at least 55 ms. Not compiled, PyTorch's kernels pass over fp32 copies: about 66 bytes, 31 GB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pretrain.functional.cross_entropy import indices_of_targets, subtract_targets_
from pretrain.functional.numerics import at_least_fp32, soft_capped
from pretrain.kernels.matmul import linear, matmul

LOGITS_PER_CHUNK = 1 << 27  # enough rows for matrix products at full speed, 256 MB in bf16


@dataclass(frozen=True)
class CrossEntropy:
    """The settings of a cross-entropy: those of `ModelConfig`, and `softcap`, within ± of which logits stay.

    `compiled`: torch.compile fuses the operations on the logits of a chunk.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None
    compiled: bool = False


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    settings: CrossEntropy,
    target_indices: Tensor | None = None,
) -> Tensor:
    """`token_losses` of the logits of states x (…, d_model). The backward pass computes the logits again: a third more
    arithmetic in this product, for no memory. `target_indices`: the indices of the labels that count.
    """
    targets = labels.flatten()
    indices = indices_of_targets(labels) if target_indices is None else target_indices
    states = x.flatten(0, -2).index_select(0, indices)
    losses = _ChunkedCrossEntropy.apply(states, weight, bias, targets.index_select(0, indices), settings)
    return losses.new_zeros(targets.shape).index_copy(0, indices, losses).view(labels.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses (n,) of states (n, d_model), each of which has a target."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: CrossEntropy,
    ) -> Tensor:
        ctx.settings = settings
        losses_of = _compiled(_losses) if settings.compiled else _losses
        losses, log_z = x.new_empty(2, len(x), dtype=at_least_fp32(x))
        for chunk in _chunks(x, weight):
            logits = soft_capped(linear(x[chunk], weight, bias), settings.softcap)
            losses[chunk], log_z[chunk] = losses_of(logits, targets[chunk], settings.z_loss, settings.label_smoothing)
        ctx.save_for_backward(x, weight, bias, targets, log_z)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        """dL/dlogit = (1 + 2 z log Z) p − (1 − s) [target] − s / vocabulary, times the loss's own gradient; with a soft
        cap also times its slope, 1 − (capped / cap)²."""
        x, weight, bias, targets, log_z = ctx.saved_tensors
        settings = ctx.settings
        to_grad_ = _compiled(_logits_to_grad_) if settings.compiled else _logits_to_grad_
        grad_softmax = gradient * (1 + 2 * settings.z_loss * log_z)
        grad_x = torch.empty_like(x)
        # in fp32: a bf16 sum would lose the share of a chunk
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=log_z.dtype)
        for chunk in _chunks(x, weight):
            logits = soft_capped(linear(x[chunk], weight, bias), settings.softcap)
            slope = None if settings.softcap is None else 1 - (logits / settings.softcap).square_()
            rows = targets[chunk], log_z[chunk], grad_softmax[chunk], gradient[chunk]
            to_grad_(logits, *rows, settings.label_smoothing)
            if slope is not None:
                logits *= slope
            grad_x[chunk] = matmul(logits, weight)
            grad_weight += matmul(logits.t(), x[chunk])
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0, dtype=grad_bias.dtype)
        rounded = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_x, grad_weight.to(weight.dtype), rounded, None, None


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of the states x (n, d_model) that have about LOGITS_PER_CHUNK logits each."""
    step = max(1, LOGITS_PER_CHUNK // len(weight))
    return (slice(first, first + step) for first in range(0, len(x), step))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _losses(logits: Tensor, targets: Tensor, z_loss: float, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The losses (n,) of logits (n, vocabulary), and log Z (n,), at least in fp32."""
    logits = logits.to(at_least_fp32(logits))
    log_z = logits.logsumexp(dim=-1)
    expected = logits.gather(-1, targets[:, None]).squeeze(-1)
    if label_smoothing:
        expected = (1 - label_smoothing) * expected + label_smoothing * logits.mean(dim=-1)
    return z_loss * log_z.square() + log_z - expected, log_z


def _logits_to_grad_(
    logits: Tensor, targets: Tensor, log_z: Tensor, grad_softmax: Tensor, grad_targets: Tensor, label_smoothing: float
) -> None:
    """Overwrites logits (n, vocabulary) by their gradients; the other tensors are (n,)."""
    gradient = logits.to(log_z.dtype).sub_(log_z[:, None]).exp_().mul_(grad_softmax[:, None])
    if torch.compiler.is_compiling():  # one pass; a scatter would need the gradient in fp32 in memory
        gradient -= (label_smoothing / gradient.size(-1) * grad_targets)[:, None]
        is_target = torch.arange(gradient.size(-1), device=logits.device) == targets[:, None]
        gradient -= torch.where(is_target, ((1 - label_smoothing) * grad_targets)[:, None], 0.0)
    else:
        subtract_targets_(gradient, targets, grad_targets, label_smoothing)
    logits.copy_(gradient)
