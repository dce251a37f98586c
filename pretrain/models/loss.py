"""The loss of each target token."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position without a target: padding, or a row of weight zero


def token_losses(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy in nats, fp32: logits (batch, length, vocabulary), labels (batch, length) → (batch, length).

    A label of -100 costs 0. `z_loss` · (log Z)² is added where it is positive: it keeps the softmax's normaliser
    near 1 (Mesh TensorFlow; 1e-4 in T5).
    """
    logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").unflatten(
        0, labels.shape
    )
    if z_loss > 0.0:
        losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square() * (labels != IGNORED)
    return losses
