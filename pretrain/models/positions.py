"""T5's relative positions (Raffel et al. 2020, section 2.1): one learned scalar per head and bucket of distances."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def relative_position_bucket(
    relative_position: Tensor, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """Buckets of `key position − query position`: exact while near, growing with the logarithm when further.

    Bidirectional, half of the buckets are for keys after the query; otherwise such keys share bucket 0.

        bidirectional, 32 buckets, 128:   -200 → 15   -9 → 8   -1 → 1   0 → 0   1 → 17   200 → 31
        unidirectional:                   -200 → 31   -17 → 16   -1 → 1   0 → 0   1 → 0
    """
    if bidirectional:
        num_buckets //= 2
        offset = torch.where(relative_position > 0, num_buckets, 0)
        distance = relative_position.abs()
    else:
        offset = torch.zeros_like(relative_position)
        distance = (-relative_position).clamp(min=0)
    num_exact = num_buckets // 2
    # fp32 whatever the model's dtype: bf16 would move the edges of the buckets
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (growth * (num_buckets - num_exact)).long()
    return offset + torch.where(distance < num_exact, distance, far.clamp(max=num_buckets - 1))


class RelativePositionBias(nn.Module):
    """What a stack adds to the attention logits of all its layers."""

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, bidirectional: bool, std: float):
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads).normal_(std=std))

    def forward(self, queries: int, keys: int) -> Tensor:
        """(1, heads, queries, keys); the last query stands at the last key, as it does for a growing decoder.

        The bias depends on the distance alone: each of the queries + keys − 1 diagonals is looked up once, and
        the row of a query is a window over them.
        """
        distances = torch.arange(1 - keys, queries, device=self.weight.device)
        buckets = relative_position_bucket(distances, self.bidirectional, self.num_buckets, self.max_distance)
        diagonals = F.embedding(buckets, self.weight).t()
        return diagonals.unfold(1, keys, 1).flip(1)[None]
