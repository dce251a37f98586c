"""Which queries see which keys, as a kernel reads it: labels of positions, and ranges that spare it whole tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

GRANULE = 64  # positions for each entry of a range
_SETS = 64  # labels are compared up to this modulus when ranges are made; kernels compare them exactly
_HIDDEN = -1  # the label of a key that nothing sees


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
    queries: int, key_mask: Tensor | None, query_segments: Tensor | None, key_segments: Tensor | None
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
    padded = torch.nn.functional.pad(labels, (0, -labels.size(1) % GRANULE), value=_HIDDEN)
    members = padded.remainder(_SETS)[..., None] == torch.arange(_SETS, device=labels.device)
    members &= (padded != _HIDDEN)[..., None]
    return members.unflatten(1, (-1, GRANULE)).any(dim=2).float()


def _ranges(meet: Tensor, length: int) -> Tensor:
    """(batch, 2, granules) from `meet` (batch, granules, granules of the other side, which has `length` positions)."""
    others = torch.arange(meet.size(2), device=meet.device)
    start = torch.where(meet, others, meet.size(2)).amin(dim=2) * GRANULE
    end = torch.where(meet, others + 1, 0).amax(dim=2) * GRANULE
    return torch.stack([start, end.clamp(max=length)], dim=1).int().contiguous()
