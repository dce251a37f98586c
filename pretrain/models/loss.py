"""The loss of each target token."""

from typing import Any

import torch
from torch import Tensor

from pretrain.models.config.base import ModelConfig

# Losses by the name of their labels: "labels" (batch, targets), "next_sentence_labels" (batch,). The loss of a step is
# the sum of their means over the labels that count. A loss of any other name is averaged over "labels".
Losses = dict[str, Tensor]
IGNORED = -100  # the label of a position without a target: padding, or a row of weight zero


def shift_right(labels: Tensor, start_id: int, segments: Tensor | None = None, pad_id: int | None = None) -> Tensor:
    """Decoder inputs for labels (batch, length): [5, 6, 1, -100] → [0, 5, 6, 1].

    Ignored labels become `pad_id`, by default `start_id`, as in T5, where padding starts the decoder.
    Each example of a packed row has its own start: [5, 1, 6, 1] with segments [1, 1, 2, 2] → [0, 5, 0, 6].
    """
    pad_id = start_id if pad_id is None else pad_id
    start = labels.new_full((labels.size(0), 1), start_id)
    shifted = torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_id)], dim=1)
    if segments is not None:
        shifted[:, 1:].masked_fill_(segments[:, 1:] != segments[:, :-1], start_id)
    return shifted


def configured_losses(logits: Tensor, labels: Tensor, config: ModelConfig, training: bool) -> Tensor:
    """`token_losses`, with the z-loss and label smoothing of `config` in training."""
    return token_losses(logits, labels, *((config.z_loss, config.label_smoothing) if training else (0.0, 0.0)))


def token_losses(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy in nats, fp32: logits (batch, length, vocabulary), labels (batch, length) → (batch, length).

    The loss of a label of -100 is 0. A positive `z_loss` adds `z_loss` · (log Z)², which keeps the softmax's normaliser
    near 1 (Mesh TensorFlow; 1e-4 in T5). `label_smoothing` spreads that share of each target's mass over all ids
    (Szegedy et al. 2016).

    The softmax is computed in fp32, also for bf16 logits, for at most `_ROWS` targets at a time: besides the logits,
    only their gradient takes memory.
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    return _TokenLosses.apply(flat, targets, z_loss, label_smoothing).view(labels.shape)


_ROWS = 1024


class _TokenLosses(torch.autograd.Function):
    """Losses of logits (n, vocabulary) and labels (n,), computed a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, smoothing: float) -> Tensor:
        counted = labels != IGNORED
        targets = labels.clamp(min=0)
        precision = torch.promote_types(logits.dtype, torch.float32)
        normalisers, losses = [], []
        for rows, ids in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True):
            rows = rows.to(precision)
            log_z = torch.logsumexp(rows, dim=-1)
            expected = rows.gather(-1, ids[:, None]).squeeze(-1)
            if smoothing:
                expected = (1 - smoothing) * expected + smoothing * rows.mean(dim=-1)
            normalisers.append(log_z)
            losses.append(log_z - expected + z_loss * log_z.square())
        log_z = torch.cat(normalisers)
        ctx.save_for_backward(logits, targets, counted, log_z)
        ctx.z_loss, ctx.smoothing = z_loss, smoothing
        return torch.cat(losses).masked_fill(~counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """dL/dlogit = (1 + 2 z log Z) p − (1 − s) [target] − s / vocabulary"""
        logits, targets, counted, log_z = ctx.saved_tensors
        gradient = gradient.masked_fill(~counted, 0.0)
        out = torch.empty_like(logits)
        parts = (tensor.split(_ROWS) for tensor in (logits, targets, log_z, gradient, out))
        for rows, ids, normaliser, weight, into in zip(*parts, strict=True):
            shares = torch.exp(rows.to(normaliser.dtype) - normaliser[:, None])
            shares *= (1 + 2 * ctx.z_loss * normaliser)[:, None]
            shares -= ctx.smoothing / logits.size(-1)
            shares.scatter_add_(-1, ids[:, None], torch.full_like(normaliser, ctx.smoothing - 1)[:, None])
            into.copy_(shares * weight[:, None])
        return out, None, None, None
