"""Positions: relative as in T5, linear biases, rotations, sinusoids, learned vectors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.models.asynchronous import to_device
from pretrain.models.layers import Embedding, draw_normal

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each broadcasting to (batch, heads, length, d_kv)


def relative_position_bucket(
    relative_position: Tensor, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """The buckets of `key position − query position`: exact for small distances, logarithmic for larger ones.

    If bidirectional, half of the buckets are for keys after the query; otherwise all those keys share bucket 0.

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
    # always fp32: bf16 would shift the bucket boundaries
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (growth * (num_buckets - num_exact)).long()
    return offset + torch.where(distance < num_exact, distance, far.clamp(max=num_buckets - 1))


class RelativePositionBias(nn.Module):
    """T5's relative positions (Raffel et al. 2020, section 2.1): a scalar per head and bucket, shared by all layers."""

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, bidirectional: bool, std: float):
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        draw_normal(self.weight, std)

    def forward(self, queries: int, keys: int) -> Tensor:
        """Returns the diagonals (heads, queries + keys − 1): the bias of query i and key j at queries − 1 − i + j.

        The last query is aligned with the last key, as in a growing decoder. The bias depends only on the distance, so
        each diagonal is looked up once.
        """
        distances = torch.arange(1 - keys, queries, device=self.weight.device)
        buckets = relative_position_bucket(distances, self.bidirectional, self.num_buckets, self.max_distance)
        return F.embedding(buckets, self.weight).t()


class LinearBias(nn.Module):
    """ALiBi (Press et al. 2022): each head subtracts its slope times the distance; nothing is learned.

    The paper has decoders only, which look only back. If bidirectional, a head's slope for keys after the query is
    steeper, half-way to the next head's: with equal slopes an encoder couldn't distinguish a text from its reverse.
    """

    def __init__(self, num_heads: int, bidirectional: bool = False):
        super().__init__()
        self.num_heads, self.bidirectional = num_heads, bidirectional

    def forward(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns the diagonals (heads, queries + keys − 1), as `RelativePositionBias` does."""
        slopes = to_device(linear_bias_slopes(self.num_heads), device)[:, None]
        distances = torch.arange(1 - keys, queries, device=device)
        after = 2.0 ** (4 / _power_of_two(self.num_heads)) if self.bidirectional else 1.0
        return (-slopes * torch.where(distances > 0, after * distances, -distances)).to(dtype)


def linear_bias_slopes(num_heads: int) -> list[float]:
    """2^(−8/n), 2^(−16/n), … for n heads. If n is not a power of two: the slopes of the power below n, then every other
    slope of twice that power.

    4 heads → 1/4, 1/16, 1/64, 1/256
    """
    whole = _power_of_two(num_heads)
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (num_heads - whole), 2)]
    return slopes + between


def _power_of_two(number: int) -> int:
    """The greatest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def rotary_embedding(positions: Tensor, d_kv: int, dtype: torch.dtype, base: float = 10_000.0) -> Rotary:
    """The rotations of rotary positions (Su et al. 2021), for `positions` (length,) or (batch, length); angles in fp32.

    Dimensions i and i + d_kv / 2 are rotated together by position · base^(−2i / d_kv).
    """
    # Rounded like transformers' frequencies: at position 5,000, another rounding would move an angle by up to 6e-4.
    frequencies = 1.0 / base ** (torch.arange(0, d_kv, 2, device=positions.device, dtype=torch.float32) / d_kv)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    if angles.dim() == 3:
        angles = angles[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, by: Rotary) -> Tensor:
    """Rotates `x` (batch, heads, length, d_kv)."""
    cosines, sines = by
    one, other = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-other, one], dim=-1) * sines


def sinusoids(positions: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """(…, d_model) for `positions` (…): sines and cosines alternate (Vaswani et al. 2017, section 3.5)."""
    frequencies = 10_000.0 ** (-torch.arange(0, d_model, 2, device=positions.device, dtype=torch.float32) / d_model)
    angles = positions[..., None].float() * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :d_model].to(dtype)


class LearnedPositions(Embedding):
    """One vector for each position, N(0, std²); `offset` rows before the first are never used (BART has two)."""

    def __init__(self, num_positions: int, d_model: int, std: float, offset: int = 0):
        super().__init__(num_positions + offset, d_model, std)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """(…, d_model) for `positions` (…)."""
        return super().forward(positions + self.offset)


def positions_from(start: int, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
    """Positions (length,) from `start` on, or the positions (batch, length) `given` for packed examples."""
    return torch.arange(start, start + length, device=device) if given is None else given


def real_positions(mask: Tensor) -> Tensor:
    """Positions (batch, length) that count only real tokens: [0, 0, 1, 1, 1] → [0, 0, 0, 1, 2]."""
    return (mask.bool().cumsum(dim=1) - 1).clamp(min=0)
