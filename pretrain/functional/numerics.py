"""The precision and the bounds of numbers."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> torch.dtype:
    """fp32, or the dtype of `x` where that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap) (Gemma 2, section 2): nearly the identity for small logits, and never beyond ±cap.

    Without a cap, the logits as they are.
    """
    return logits if cap is None else cap * torch.tanh(logits / cap)
