"""Which keys a query sees: one boolean matrix combines causality, windows, padding and segments."""

from typing import NamedTuple

import torch
from torch import Tensor

MASKED = -1e9  # exactly zero after softmax


class Window(NamedTuple):
    """A query sees only this many keys `before` itself and `after` itself, besides the key in its own position."""

    before: int
    after: int = 0

    def hides_nothing(self, queries: int, keys: int) -> bool:
        """Whether the last `queries` of `keys` tokens see all of them."""
        return self.before >= keys - 1 and self.after >= queries - 1


def visible(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool = False,
    window: Window | None = None,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    prefix: Tensor | None = None,
    allow_empty: bool = False,
) -> Tensor | None:
    """True where a query sees a key, broadcasting to (batch, heads, queries, keys); None if every query sees every key.

    With `causal`, a query sees no future key, and with a `window` no distant one; the last query is aligned with the
    last key. `key_mask` (batch, keys) is nonzero at real keys. With segments (batch, queries) and (batch, keys), an
    example of a packed row sees only itself. Keys in a `prefix` (batch, keys), where it is nonzero, aren't future ones.

    Unless `allow_empty`, a query that would see no key, of padding or without any input, sees every key. Kernels that
    compute the softmax a second time, from the logarithm of its sum, would give a wrong gradient for it: that logarithm
    would be MASKED, in which fp32 loses it. cuDNN's gives NaN (PyTorch issue 196678).
    """
    masks = []
    if causal:
        past = _band(queries, keys, device, after=0)
        masks.append(past if prefix is None else past | prefix[:, None, None, :].bool())
    if window is not None:
        masks.append(_band(queries, keys, device, *window))
    if key_mask is not None:
        masks.append(key_mask[:, None, None, :].bool())
    if query_segments is not None and key_segments is not None:
        masks.append(query_segments[:, None, :, None] == key_segments[:, None, None, :])
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    if allow_empty or (key_mask is None and query_segments is None):
        return mask  # in the latter case a query sees the key in its own position
    return mask | ~mask.any(dim=-1, keepdim=True)


def _band(queries: int, keys: int, device: torch.device, before: int | None = None, after: int = 0) -> Tensor:
    """(1, 1, queries, keys) True at keys up to `before` positions before a query (None: any number), and `after` it."""
    first = keys - queries  # the key in the position of query 0
    band = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(first + after)
    return (band if before is None else band.triu(first - before))[None, None]


def masked(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias to add to attention logits: `bias`, if any, and MASKED at keys outside `mask`."""
    if mask is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device).expand(mask.shape)
    return bias.masked_fill(~mask, MASKED)
