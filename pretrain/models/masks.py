"""Attention masks: one boolean mask combines causality, padding and segments."""

import torch
from torch import Tensor

MASKED = -1e9  # exactly zero after softmax


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
    """True where a query sees a key, broadcasting to (batch, heads, queries, keys); None if every query sees every key.

    With `causal`, a query sees no future key; the last query is aligned with the last key. `key_mask` (batch, keys) is
    nonzero at real keys. With segments (batch, queries) and (batch, keys), an example of a packed row sees only itself.

    A query that would see no key, of padding or without any input, sees every key. Kernels that compute the softmax a
    second time, from the logarithm of its sum, would give a wrong gradient for it: that logarithm would be MASKED, in
    which fp32 loses it. cuDNN's gives NaN (PyTorch issue 196678).
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
    return mask if causal and len(masks) == 1 else mask | ~mask.any(dim=-1, keepdim=True)


def masked(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias to add to attention logits: `bias`, if any, and MASKED at keys outside `mask`."""
    if mask is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device).expand(mask.shape)
    return bias.masked_fill(~mask, MASKED)
