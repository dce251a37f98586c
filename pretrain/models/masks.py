"""Who may look at whom: one boolean mask of everything that forbids it."""

import torch
from torch import Tensor

# Finite, so that a row whose keys are all masked gives a mean of values and not NaN; exact zero after softmax.
MASKED = -1e9


def visible(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> Tensor | None:
    """True where a query sees a key, broadcasting to (batch, heads, queries, keys); None where all see all.

    `causal`: no key of the query's future, the last query standing at the last key. `key_mask` (batch, keys): nonzero
    at real keys. Segments (batch, queries) and (batch, keys): the examples of a packed row see only themselves.
    """
    masks = []
    if causal:
        masks.append(torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None])
    if key_mask is not None:
        masks.append(key_mask[:, None, None, :].bool())
    if query_segments is not None and key_segments is not None:
        masks.append(query_segments[:, None, :, None] == key_segments[:, None, None, :])
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask


def masked(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What to add to attention logits: `bias`, if any, and so much at keys outside `mask` that they vanish."""
    if mask is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device).expand(mask.shape)
    return bias.masked_fill(~mask, MASKED)
