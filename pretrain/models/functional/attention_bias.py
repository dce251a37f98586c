"""The bias of attention logits, with the masks of causality, windows, padding and segments.

It is a matrix, or a `Pattern`, which kernels read: labels of positions, and ranges that spare them whole tiles.
"""

from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.processes import available_memory
from pretrain.models.kernels import GRANULE, MARGIN

MASKED = -1e9  # exactly zero after softmax
_SETS = 64  # labels are compared up to this modulus when ranges are made; kernels compare them exactly
_LARGE = 2**30  # bytes; what a matrix of usual size needs isn't compared
_HIDDEN = -1  # the label of a key that nothing sees


class Window(NamedTuple):
    """A query sees only this many keys `before` itself and `after` itself, besides the key in its own position."""

    before: int
    after: int = 0

    def hides_nothing(self, queries: int, keys: int) -> bool:
        """True if the last `queries` of `keys` tokens see all of them."""
        return self.before >= keys - 1 and self.after >= queries - 1


def refuse_beyond_memory(like: Tensor, queries: int, keys: int, matrices: int) -> None:
    """Raises UserError if so many matrices of queries × keys can't fit into memory, whatever this process frees: Linux
    would kill it."""
    needed = matrices * queries * keys * like.element_size()
    if needed <= _LARGE or like.device.type != "cpu":
        return
    if needed > (most := available_memory() + psutil.Process().memory_info().rss):
        raise UserError(
            f"attention of {queries:,} tokens to {keys:,} needs {human_size(needed)} of memory, and there are "
            f"{human_size(most)}; give shorter texts, or fewer together"
        )


class Visibility(NamedTuple):
    """Which keys a query sees: those that no field hides. By default every query sees every key.

    - `causal`: hides the keys after a query's position. The last query is aligned with the last key.
    - `window`: hides the keys outside the window around a query's position.
    - `key_mask` (batch, keys): hides padding, where the mask is zero.
    - `query_segments` (batch, queries), `key_segments` (batch, keys): hide the other examples of a packed row.
    - `prefix` (batch, keys): `causal` doesn't hide the keys where the prefix is nonzero.
    """

    causal: bool = False
    window: Window | None = None
    key_mask: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    prefix: Tensor | None = None

    @property
    def differs_by_row(self) -> bool:
        """True if rows of a batch may have different masks."""
        tensors = (self.key_mask, self.query_segments, self.key_segments, self.prefix)
        return any(one is not None for one in tensors)

    def mask(self, queries: int, keys: int, device: torch.device, allow_empty: bool = False) -> Tensor | None:
        """True where a query sees a key, broadcasting to (batch, heads, queries, keys); None if nothing is hidden.

        Unless `allow_empty`, a query that would see no key, of padding or without any input, sees every key. Kernels
        that compute the softmax a second time, from the logarithm of its sum, would give a wrong gradient for such a
        query: that logarithm would be MASKED, in which fp32 loses it. cuDNN's gives NaN (PyTorch issue 196678).
        """
        masks = []
        if self.causal:
            past = _band(queries, keys, device, after=0)
            masks.append(past if self.prefix is None else past | self.prefix[:, None, None, :].bool())
        if self.window is not None:
            masks.append(_band(queries, keys, device, self.window.before, self.window.after))
        if self.key_mask is not None:
            masks.append(self.key_mask[:, None, None, :].bool())
        if self.query_segments is not None and self.key_segments is not None:
            masks.append(self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :])
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        if allow_empty or (self.key_mask is None and self.query_segments is None):
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


class Labels(NamedTuple):
    """A query sees a key if their labels are equal. All int32 and contiguous, on the device of the attention.

    - `queries` (batch, queries) and `keys` (batch, keys): the labels.
    - `key_ranges` (batch, 2, ⌈queries / GRANULE⌉): the first key that any query of a granule may see, and the key after
      the last.
    - `query_ranges` (batch, 2, ⌈keys / GRANULE⌉): the same for keys, in queries.
    """

    queries: Tensor
    keys: Tensor
    key_ranges: Tensor
    query_ranges: Tensor


def labels(
    queries: int,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> Labels | None:
    """The labels of padding, where `key_mask` (batch, keys) is 0, and of the segments of packed rows.

    None if every query sees every key. Nothing here waits for the device.
    """
    if query_segments is not None and key_segments is not None:
        query_labels, key_labels = query_segments.int(), key_segments.int()
    elif key_mask is not None:
        query_labels, key_labels = (
            key_mask.new_ones(key_mask.size(0), queries, dtype=torch.int32),
            torch.ones_like(key_mask, dtype=torch.int32),
        )
    else:
        return None
    if key_mask is not None:
        key_labels = key_labels.masked_fill(key_mask == 0, _HIDDEN)
    meet = torch.einsum("bqs,bks->bqk", _sets(query_labels), _sets(key_labels)) > 0
    ranges = _ranges(meet, key_labels.size(1)), _ranges(meet.transpose(1, 2), queries)
    return Labels(query_labels.contiguous(), key_labels.contiguous(), *ranges)


def _sets(labels: Tensor) -> Tensor:
    """(batch, granules, _SETS) fp32: 1 where a granule has a label of that remainder."""
    padded = F.pad(labels, (0, -labels.size(1) % GRANULE), value=_HIDDEN)
    members = padded.remainder(_SETS)[..., None] == torch.arange(_SETS, device=labels.device)
    members &= (padded != _HIDDEN)[..., None]
    return members.unflatten(1, (-1, GRANULE)).any(dim=2).float()


def _ranges(meet: Tensor, length: int) -> Tensor:
    """(batch, 2, granules) from `meet` (batch, granules, granules of the other side, which has `length` positions)."""
    others = torch.arange(meet.size(2), device=meet.device)
    start = torch.where(meet, others, meet.size(2)).amin(dim=2) * GRANULE
    end = torch.where(meet, others + 1, 0).amax(dim=2) * GRANULE
    return torch.stack([start, end.clamp(max=length)], dim=1).int().contiguous()


class Pattern(NamedTuple):
    """A bias and masks without a matrix of queries × keys.

    - `diagonals` (heads, queries + keys − 1): the bias; that of query i and key j stands at queries − 1 − i + j.
    - `labels`: which keys each query sees; None: all.
    - `causal`: no query sees a later key; the last of each are aligned.
    - `window`: no query sees a key outside it.
    - `padded`: the diagonals as kernels read them, for all layers that share them; None: each makes its own.
    """

    diagonals: Tensor | None
    labels: Labels | None
    causal: bool
    window: Window | None = None
    padded: Tensor | None = None

    def matrix(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The bias that means the same, broadcasting to (batch, heads, queries, keys)."""
        bias = None if self.diagonals is None else toeplitz(self.diagonals, keys)
        if self.labels is not None:
            seen = self.labels.queries[:, None, :, None] == self.labels.keys[:, None, None, :]
            bias = masked(bias, seen, dtype)
        return masked(bias, Visibility(self.causal, self.window).mask(queries, keys, device), dtype)


def with_margin(diagonals: Tensor) -> Tensor:
    """The diagonals in fp32, with MARGIN more on both sides."""
    return F.pad(diagonals.float(), (MARGIN, MARGIN))


def toeplitz(diagonals: Tensor, keys: int) -> Tensor:
    """(1, heads, queries, keys) from (heads, queries + keys − 1): the row of a query is a window over its diagonals.

    A query's keys lie side by side: PyTorch's attention copies any other layout in each layer.
    """
    return diagonals.contiguous().unfold(1, keys, 1).flip(1).contiguous()[None]
