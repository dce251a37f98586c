"""What is added to attention logits: the bias of positions, and masks; as a matrix, or as a GPU kernel reads it."""

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.models.attention_backend import by_kernel
from pretrain.models.visibility import Labels, Window, labels, masked, visible


class Pattern(NamedTuple):
    """A bias and masks without a matrix of queries × keys.

    - `diagonals` (heads, queries + keys − 1): the bias; that of query i and key j stands at queries − 1 − i + j.
    - `labels`: which keys each query sees; None: all.
    - `causal`: no query sees a later key; the last of each are aligned.
    - `window`: no query sees a key outside it.
    """

    diagonals: Tensor | None
    labels: Labels | None
    causal: bool
    window: Window | None = None

    def matrix(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The bias that means the same, broadcasting to (batch, heads, queries, keys)."""
        bias = None if self.diagonals is None else toeplitz(self.diagonals, keys)
        if self.labels is not None:
            seen = self.labels.queries[:, None, :, None] == self.labels.keys[:, None, None, :]
            bias = masked(bias, seen, dtype)
        return masked(bias, visible(queries, keys, device, causal=self.causal, window=self.window), dtype)


def toeplitz(diagonals: Tensor, keys: int) -> Tensor:
    """(1, heads, queries, keys) from (heads, queries + keys − 1): the row of a query is a window over its diagonals.

    A query's keys lie side by side: PyTorch's attention copies any other layout in each layer.
    """
    return diagonals.contiguous().unfold(1, keys, 1).flip(1).contiguous()[None]


def logit_bias(
    x: Tensor,
    keys: int,
    diagonals: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor | Pattern | None:
    """The `bias` of `Attention` for queries `x` (batch, queries, d_model), in the form that `attend` computes fastest.

    `diagonals` as in `Pattern`, the rest as in `visible`. Made once for all layers of a stack that see the same. No
    kernel of ours knows prefixes.
    """
    queries = x.size(1)
    if queries > 1 and prefix is None and by_kernel(x):
        seen = labels(queries, key_mask, query_segments, key_segments)
        everything = diagonals is None and seen is None and window is None and not causal
        return None if everything else Pattern(diagonals, seen, causal, window)
    mask = visible(
        queries,
        keys,
        x.device,
        causal=causal,
        window=window,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        prefix=prefix,
    )
    return masked(None if diagonals is None else toeplitz(diagonals, keys), mask, x.dtype)
