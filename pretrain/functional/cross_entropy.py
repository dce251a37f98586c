"""The cross-entropy of logits, a few rows at a time, and of logits of which only a chunk exists: what GPUs need.

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

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.functional.arithmetic import at_least_fp32, linear, matmul, soft_capped


def indices_of_targets(labels: Tensor) -> Tensor:
    """The indices (n,) of the labels that count, among all labels. On a GPU this waits for the device."""
    return (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


def token_losses(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in nats, fp32: logits (…, vocabulary), labels (…) → (…).

    The loss of a label of -100 is 0. A positive `z_loss` adds `z_loss` · (log Z)², which keeps the softmax's normaliser
    near 1 (Mesh TensorFlow; 1e-4 in T5). `label_smoothing` spreads that share of each target's mass over all ids
    (Szegedy et al. 2016).

    The softmax is computed in fp32, also for bf16 logits, for a few targets at a time: besides the logits, only their
    gradient takes memory.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    return _TokenLosses.apply(flat, targets, z_loss, label_smoothing).view(labels.shape)


def _rows_at_a_time(logits: Tensor) -> int:
    """On a CPU as many rows as its cache holds, on a GPU enough to fill it."""
    return max(1, (1 << 18 if logits.device.type == "cpu" else 1 << 25) // logits.size(-1))


class _TokenLosses(torch.autograd.Function):
    """Losses of logits (n, vocabulary) and labels (n,), computed a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, smoothing: float) -> Tensor:
        counted = labels != IGNORE_INDEX
        targets = labels.clamp(min=0)
        precision = at_least_fp32(logits)
        step = _rows_at_a_time(logits)
        normalisers, losses = [], []
        for rows, ids in zip(logits.split(step), targets.split(step), strict=True):
            rows = rows.to(precision)
            logs = torch.log_softmax(rows, dim=-1)
            expected = logs.gather(-1, ids[:, None]).squeeze(-1)
            log_z = rows.gather(-1, ids[:, None]).squeeze(-1) - expected
            if smoothing:
                expected = (1 - smoothing) * expected + smoothing * logs.mean(dim=-1)
            normalisers.append(log_z)
            losses.append(z_loss * log_z.square() - expected)
        ctx.save_for_backward(logits, targets, counted, torch.cat(normalisers))
        ctx.z_loss, ctx.smoothing = z_loss, smoothing
        return torch.cat(losses).masked_fill(~counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """dL/dlogit = (1 + 2 z log Z) p − (1 − s) [target] − s / vocabulary"""
        logits, targets, counted, log_z = ctx.saved_tensors
        gradient = gradient.masked_fill(~counted, 0.0)
        grad_softmax = gradient * (1 + 2 * ctx.z_loss * log_z)
        grad_logits = torch.empty_like(logits)
        step = _rows_at_a_time(logits)
        parts = (tensor.split(step) for tensor in (logits, targets, grad_softmax, gradient, grad_logits))
        for rows, ids, factors, grad_targets, into in zip(*parts, strict=True):
            found = torch.softmax(rows.to(log_z.dtype), dim=-1).mul_(factors[:, None])
            subtract_targets_(found, ids, grad_targets, ctx.smoothing)
            into.copy_(found)
        return grad_logits, None, None, None


def subtract_targets_(grad_logits: Tensor, targets: Tensor, grad_targets: Tensor, label_smoothing: float) -> None:
    """Subtracts the smoothed targets (n,), times `grad_targets` (n,), from (n, vocabulary)."""
    if label_smoothing:
        grad_logits -= (label_smoothing / grad_logits.size(-1) * grad_targets)[:, None]
    grad_logits.scatter_add_(-1, targets[:, None], ((label_smoothing - 1) * grad_targets)[:, None])


# --- in chunks ---


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
    arithmetic in this product, for no memory. `target_indices`: the indices of the labels that count, and maybe that of
    one that doesn't, any number of times.
    """
    targets = labels.flatten()
    indices = indices_of_targets(labels) if target_indices is None else target_indices
    states = x.flatten(0, -2).index_select(0, indices)
    losses = _ChunkedCrossEntropy.apply(states, weight, bias, targets.index_select(0, indices), settings)
    return losses.new_zeros(targets.shape).index_copy(0, indices, losses).view(labels.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses (n,) of states (n, d_model); 0, without a gradient, where the target is -100."""

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
        gradient, ids = gradient.masked_fill(targets == IGNORE_INDEX, 0.0), targets.clamp(min=0)
        grad_softmax = gradient * (1 + 2 * settings.z_loss * log_z)
        grad_x = torch.empty_like(x)
        # in fp32: a bf16 sum would lose the share of a chunk
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=log_z.dtype)
        for chunk in _chunks(x, weight):
            logits = soft_capped(linear(x[chunk], weight, bias), settings.softcap)
            slope = None if settings.softcap is None else 1 - (logits / settings.softcap).square_()
            rows = ids[chunk], log_z[chunk], grad_softmax[chunk], gradient[chunk]
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
    expected = logits.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    if label_smoothing:
        expected = (1 - label_smoothing) * expected + label_smoothing * logits.mean(dim=-1)
    return (z_loss * log_z.square() + log_z - expected).masked_fill(targets == IGNORE_INDEX, 0.0), log_z


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
