"""Positions: linear biases, rotations, sinusoids, learned vectors. Relative ones are in `t5`."""

import torch
from torch import Tensor

from pretrain.models.layers import Embedding

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each broadcasting to (batch, heads, length, d_kv)


def linear_bias(num_heads: int, bidirectional: bool, queries: int, keys: int, like: Tensor) -> Tensor:
    """ALiBi (Press et al. 2022): each head subtracts its slope times the distance; nothing is learned.

    Returns the diagonals (heads, queries + keys − 1): the bias of query i and key j at queries − 1 − i + j. The paper
    has decoders only, which look only back. If bidirectional, a head's slope for keys after the query is steeper,
    half-way to the next head's: with equal slopes an encoder couldn't distinguish a text from its reverse.
    """
    slopes = linear_bias_slopes(num_heads, like.device)[:, None]
    distances = torch.arange(1 - keys, queries, device=like.device)
    after = 2.0 ** (4 / _power_of_two(num_heads)) if bidirectional else 1.0
    return (-slopes * torch.where(distances > 0, after * distances, -distances)).to(like.dtype)


def linear_bias_slopes(num_heads: int, device: torch.device) -> Tensor:
    """(num_heads,) fp32: 2^(−8/n), 2^(−16/n), … for n heads. If n is not a power of two: the slopes of the power below
    n, then every other slope of twice that power. Computed on the device: a CUDA graph can't copy them there.

    4 heads → 1/4, 1/16, 1/64, 1/256
    """
    whole = _power_of_two(num_heads)
    own = torch.arange(1, whole + 1, device=device).double() * (-8 / whole)
    between = (2 * torch.arange(num_heads - whole, device=device) + 1).double() * (-4 / whole)
    return torch.cat([own, between]).exp2().float()


def _power_of_two(number: int) -> int:
    """The greatest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def rotary_embedding(
    positions: Tensor, d_kv: int, dtype: torch.dtype, base: float = 10_000.0, factor: float = 1.0
) -> Rotary:
    """The rotations of rotary positions (Su et al. 2021), for `positions` (length,) or (batch, length); angles in fp32.

    Dimensions i and i + d_kv / 2 are rotated together by position / factor · base^(−2i / d_kv).
    """
    # Rounded like transformers' frequencies: at position 5,000, another rounding would move an angle by up to 6e-4.
    frequencies = 1.0 / base ** (torch.arange(0, d_kv, 2, device=positions.device, dtype=torch.float32) / d_kv)
    angles = positions[..., None].float() * (frequencies / factor)
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
