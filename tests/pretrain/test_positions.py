"""Rotations, linear biases, sinusoids and learned positions, compared with their papers' formulas."""

import math

import pytest
import torch

from pretrain.functional.attention_bias import toeplitz
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    apply_rotary,
    linear_bias_slopes,
    rotary_embedding,
    sinusoids,
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(vector, position, base=10_000.0):
    """`vector` (d_kv,) rotated to `position`."""
    by = rotary_embedding(torch.tensor([position]), vector.numel(), torch.float64, base)
    return apply_rotary(vector[None, None, None], by).flatten()


def test_rotation_by_hand():
    """Su et al. 2021, equation 15: pair i turns by position · base^(−2i / d); here dimension i goes with i + d / 2."""
    x, position = random(6), 5
    found = turned(x, position, base=100.0)
    for i in range(3):
        angle = position * 100.0 ** (-2 * i / 6)
        one, other = x[i], x[i + 3]
        assert found[i].item() == pytest.approx((one * math.cos(angle) - other * math.sin(angle)).item(), abs=1e-5)
        assert found[i + 3].item() == pytest.approx((one * math.sin(angle) + other * math.cos(angle)).item(), abs=1e-5)


def test_slopes_of_linear_biases():
    """Press et al. 2022, section 3: 8 heads have 1/2, 1/4, … 1/256, 16 heads 1/√2, 1/2, 1/(2√2), …

    Their code, for a number that is no power of two: those of the next smaller one, then every other one of the next
    greater.
    """
    assert linear_bias_slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert linear_bias_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert linear_bias_slopes(16) == pytest.approx([2 ** (-power / 2) for power in range(1, 17)])
    assert linear_bias_slopes(1) == [1 / 256]
    between = [2 ** (-power / 2) for power in (1, 3, 5, 7)]
    assert linear_bias_slopes(12) == pytest.approx([2.0**-power for power in range(1, 9)] + between)


def test_linear_bias_is_the_slope_times_the_distance():
    bias = toeplitz(LinearBias(4)(3, 5, torch.device("cpu"), torch.float32), 5)
    assert bias.shape == (1, 4, 3, 5)
    for query in range(3):  # the last query is at the last key
        for key in range(5):
            distance = abs(query + 2 - key)
            assert bias[0, :, query, key].tolist() == [-slope * distance for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]


def test_an_encoders_heads_look_less_far_ahead_than_back():
    """Of the slopes of 8 heads, 4 heads have every other one for keys before the query, and the ones between for keys
    after."""
    bias = toeplitz(LinearBias(4, bidirectional=True)(3, 3, torch.device("cpu"), torch.float32), 3)
    assert bias[0, :, 2, 0].tolist() == [-2 * slope for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]
    assert bias[0, :, 0, 2].tolist() == [-2 * slope for slope in (1 / 2, 1 / 8, 1 / 32, 1 / 128)]
    assert bias.diagonal(dim1=2, dim2=3).count_nonzero() == 0


def test_sinusoids():
    """Vaswani et al. 2017, section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d)), PE(pos, 2i + 1) the cosine."""
    found = sinusoids(torch.arange(50), 10, torch.float32)
    for position in (0, 1, 7, 49):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            assert found[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert found[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)
    rows = sinusoids(torch.tensor([[3, 0], [1, 2]]), 10, torch.float32)
    torch.testing.assert_close(rows, found[torch.tensor([[3, 0], [1, 2]])], rtol=0, atol=0)
    assert sinusoids(torch.arange(3), 7, torch.bfloat16).shape == (3, 7)


def test_learned_positions_skip_their_offset():
    torch.manual_seed(0)
    learned = LearnedPositions(1000, 16, std=0.02, offset=2)
    assert learned.weight.shape == (1002, 16)
    assert learned.weight.std().item() == pytest.approx(0.02, rel=0.05)
    torch.testing.assert_close(learned(torch.tensor([[0, 999]])), learned.weight[[2, 1001]][None], rtol=0, atol=0)
