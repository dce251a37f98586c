"""Dropout and RMS norms that are fast on CPUs (`F.dropout` and `F.rms_norm` are their plain forms), soft caps, and
cross-entropy.

Cross-entropy takes a few rows of logits at a time. On GPUs, only a chunk of the logits exists at a time. Compiled, loss
and gradient read and write 8 bytes for each logit in bf16. A kernel with a running maximum would save 2 of them: 0.3 ms
of a step of T5 v1.1 base, whose matmuls take at least 55 ms on an H100.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def at_least_fp32(x: Tensor) -> torch.dtype:
    """fp32, or the dtype of `x` where that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap) (Gemma 2, section 2): nearly the identity for small logits, and never beyond ±cap.

    Without a cap, the logits as they are.
    """
    return logits if cap is None else cap * torch.tanh(logits / cap)


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


class RMSNormInCache(torch.autograd.Function):
    """x / √(mean x² + ε) · gains, for `x` (…, d_model) and gains (d_model,), computed in fp32, in the dtype of `x`.

    Like a GPU's kernel it keeps the input and a factor for each row. PyTorch's on a CPU is a chain of operations, which
    takes twice as long and keeps more. Here a few rows are taken at a time, so that what passes between operations
    stays in a cache.
    """

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


# --- cross-entropy ---


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


def rows_per_chunk(weight: Tensor) -> int:
    """The number of rows whose logits by `weight` (vocabulary, d_model) are about LOGITS_PER_CHUNK."""
    return max(1, LOGITS_PER_CHUNK // len(weight))


@dataclass(frozen=True)
class CrossEntropy:
    """The settings of a cross-entropy, as in `ModelConfig`.

    `softcap`: logits stay between −`softcap` and `softcap`. `compiled`: torch.compile fuses the operations on the
    logits of a chunk.
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
    """`token_losses` of the states x (…, d_model). Only a chunk of the logits exists at a time.

    The forward pass also computes the gradients, while it has the logits, as if the gradient of each loss were 1. The
    backward pass multiplies these gradients by the gradient of the losses' sum. If each loss has a gradient of its own,
    the backward pass computes the logits again. `target_indices`: the indices of the labels that count. The index of
    one label that doesn't count may be added any number of times, as padding.
    """
    indices = indices_of_targets(labels) if target_indices is None else target_indices
    inputs = x.flatten(0, -2).index_select(0, indices), weight, bias
    learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs)
    targets = labels.flatten().index_select(0, indices)
    return _ChunkedCrossEntropy.apply(*inputs, targets, indices, labels.shape, settings, learns)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses of the given shape, from states (n, d_model) at `indices` (n,); elsewhere 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        indices: Tensor,
        shape: torch.Size,
        settings: CrossEntropy,
        learns: bool,
    ) -> Tensor:
        ctx.settings = settings
        gradient = targets.new_ones(len(targets), dtype=at_least_fp32(x)) if learns else None
        losses, gradients = _losses_and_gradients(x, weight, bias, targets, settings, gradient)
        ctx.save_for_backward(x, weight, bias, targets, indices, *gradients)
        return losses.new_zeros(shape.numel()).index_copy_(0, indices, losses).view(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight, bias, targets, indices, *found = ctx.saved_tensors
        factor = gradient.flatten()[:1]
        if any(gradient.stride()):  # the gradient of a sum is one number, expanded
            along = gradient.flatten().index_select(0, indices)
            _, found = _losses_and_gradients(x, weight, bias, targets, ctx.settings, along)
            factor = torch.ones_like(factor)
        # `out`: rounded once, from fp32
        rounded = [
            None if one is None else torch.mul(one, factor, out=torch.empty_like(like))
            for one, like in zip(found, (x, weight, bias), strict=True)
        ]
        return *rounded, None, None, None, None, None


def _losses_and_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: CrossEntropy, gradient: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses (n,) of states (n, d_model), 0 where the target is -100.

    If the `gradient` of each loss is given, also the gradients of x, weight and bias, the last two at least in fp32:
    dL/dlogit = (1 + 2 z log Z) p − (1 − s) [target] − s / vocabulary, times the loss's own gradient; with a soft cap
    also times its slope, 1 − (capped / cap)².
    """
    losses_of = _compiled(_losses) if settings.compiled else _losses
    to_grad_ = _compiled(_logits_to_grad_) if settings.compiled else _logits_to_grad_
    losses = x.new_empty(len(x), dtype=at_least_fp32(x))
    ignored, ids = targets == IGNORE_INDEX, targets.clamp(min=0)
    grad_x = grad_weight = grad_bias = None
    if gradient is not None:
        gradient = gradient.masked_fill(ignored, 0.0)
        grad_x = torch.empty_like(x)
        # in fp32: a bf16 sum would lose the share of a chunk
        grad_weight = torch.zeros_like(weight, dtype=losses.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=losses.dtype)
    for chunk in _chunks(x, weight):
        logits = soft_capped(F.linear(x[chunk], weight, bias), settings.softcap)
        losses[chunk], log_z = losses_of(logits, ids[chunk], settings.z_loss, settings.label_smoothing)
        if gradient is None or grad_x is None or grad_weight is None:
            continue
        slope = None if settings.softcap is None else 1 - (logits / settings.softcap).square_()
        along = gradient[chunk]
        grad_softmax = torch.addcmul(along, along, log_z, value=2 * settings.z_loss)
        to_grad_(logits, ids[chunk], log_z, grad_softmax, along, settings.label_smoothing)
        if slope is not None:
            logits *= slope
        grad_x[chunk] = logits @ weight
        grad_weight += logits.t() @ x[chunk]
        if grad_bias is not None:
            grad_bias += logits.sum(dim=0, dtype=grad_bias.dtype)
    return losses.masked_fill_(ignored, 0.0), [] if gradient is None else [grad_x, grad_weight, grad_bias]


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Slices of the states x (n, d_model) that have about LOGITS_PER_CHUNK logits each."""
    step = rows_per_chunk(weight)
    return (slice(first, first + step) for first in range(0, len(x), step))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for any number of rows, once two have come. The vocabulary and the settings stay constants:
    for variables a kernel would divide each index, and compute shares of smoothing in fp64."""
    return torch.compile(function)


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
