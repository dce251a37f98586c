"""Linear biases and sinusoids, compared with their papers, and rotations with transformers'."""

import pytest
import torch

from pretrain.models.functional.attention_backends import toeplitz
from pretrain.models.positions import linear_bias, linear_bias_slopes, rotary_embedding, sinusoids
from tests.support.tables import each


def test_slopes_of_linear_biases():
    """Press et al. 2022, section 3: 8 heads have 1/2, 1/4, … 1/256, 16 heads 1/√2, 1/2, 1/(2√2), …

    Their code, for a number that is no power of two: those of the next smaller one, then every other one of the next
    greater.
    """

    def slopes(heads: int) -> list[float]:
        return linear_bias_slopes(heads, torch.device("cpu")).tolist()

    assert slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert slopes(8) == [2.0**-power for power in range(1, 9)]
    assert slopes(16) == pytest.approx([2 ** (-power / 2) for power in range(1, 17)])
    assert slopes(1) == [1 / 256]
    between = [2 ** (-power / 2) for power in (1, 3, 5, 7)]
    assert slopes(12) == pytest.approx([2.0**-power for power in range(1, 9)] + between)


def test_linear_bias_is_the_slope_times_the_distance():
    bias = toeplitz(linear_bias(4, False, 3, 5, torch.empty(0)), 5)
    assert bias.is_contiguous()  # else PyTorch's attention copies it in each layer
    assert bias.shape == (1, 4, 3, 5)
    for query in range(3):  # the last query is at the last key
        for key in range(5):
            distance = abs(query + 2 - key)
            assert bias[0, :, query, key].tolist() == [-slope * distance for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]


def test_an_encoders_heads_look_less_far_ahead_than_back():
    """Of the slopes of 8 heads, 4 heads have every other one for keys before the query, and the ones between for keys
    after."""
    bias = toeplitz(linear_bias(4, True, 3, 3, torch.empty(0)), 3)
    assert bias[0, :, 2, 0].tolist() == [-2 * slope for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]
    assert bias[0, :, 0, 2].tolist() == [-2 * slope for slope in (1 / 2, 1 / 8, 1 / 32, 1 / 128)]
    assert bias.diagonal(dim1=2, dim2=3).count_nonzero() == 0


def test_sinusoids_of_rows_and_of_an_odd_width():
    found = sinusoids(torch.arange(50), 10, torch.float32)
    rows = sinusoids(torch.tensor([[3, 0], [1, 2]]), 10, torch.float32)
    torch.testing.assert_close(rows, found[torch.tensor([[3, 0], [1, 2]])], rtol=0, atol=0)
    assert sinusoids(torch.arange(3), 7, torch.bfloat16).shape == (3, 7)


@each("d_kv, base, factor", [(64, 1e4, 1.0), (128, 5e5, 1.0), (256, 1e6, 8.0), (64, 1e4, 3.3)])
def test_rotations_are_those_of_transformers_to_the_bit(d_kv, base, factor):
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
    settings = {"head_dim": d_kv, "rope_parameters": {**scaling, "rope_theta": base}}
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**settings))
    positions = torch.arange(0, 20_000, 7)
    expected = rotary(torch.zeros(1), positions[None])
    assert all(
        torch.equal(ours, theirs[0])
        for ours, theirs in zip(rotary_embedding(positions, d_kv, torch.float32, base, factor), expected, strict=True)
    )
