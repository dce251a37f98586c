"""The cross-entropy of logits, a few rows at a time."""

from typing import Any

import torch
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.functional.numerics import at_least_fp32


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
