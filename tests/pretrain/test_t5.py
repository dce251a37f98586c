"""T5, compared with its paper's numbers, and other positions with the formulas of theirs."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.functional.attention_bias import toeplitz
from pretrain.models.positions import LinearBias, linear_bias_slopes, sinusoids
from pretrain.models.t5 import RelativePositionBias, relative_position_bucket
from tests.pretrain.small_models import as_at_the_start, ids
from tests.tables import each


@each("bidirectional", [True, False])
def test_buckets_are_those_of_transformers(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-300, 300)
    found = relative_position_bucket(distances, bidirectional)
    assert torch.equal(found, t5._relative_position_bucket(distances, bidirectional))


@each("sizes, bidirectional", itertools.product([(5, 5), (1, 9), (3, 200), (150, 150)], [True, False]))
def test_relative_bias_of_a_query_and_a_key_is_that_of_their_distance(sizes, bidirectional):
    queries, keys = sizes
    bias = RelativePositionBias(32, 128, 4, bidirectional, std=1.0)
    positions = torch.arange(keys)
    distances = positions[None, :] - positions[keys - queries :, None]
    expected = bias.weight[relative_position_bucket(distances, bidirectional)].permute(2, 0, 1)[None]
    found = toeplitz(bias(queries, keys), keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.is_contiguous()  # else PyTorch's attention copies it in each layer


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


def test_sinusoids_of_rows_and_of_an_odd_width():
    """Of the vanilla Transformer, test_single_families.py compares them with their formula."""
    found = sinusoids(torch.arange(50), 10, torch.float32)
    rows = sinusoids(torch.tensor([[3, 0], [1, 2]]), 10, torch.float32)
    torch.testing.assert_close(rows, found[torch.tensor([[3, 0], [1, 2]])], rtol=0, atol=0)
    assert sinusoids(torch.arange(3), 7, torch.bfloat16).shape == (3, 7)


def test_configs_do_not_import_torch():
    code = "import sys, pretrain.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_five_files_are_read_from_the_ids_to_the_loss():
    """Those of models that a forward pass enters: below them are functions of tensors."""
    model, entered = as_at_the_start("t5", dropout_rate=0.1).train(), set()
    sys.setprofile(lambda frame, *_: entered.add(Path(frame.f_code.co_filename)))
    try:
        model(ids(2, 9), ids(2, 7), encoder_attention_mask=torch.ones(2, 9))
    finally:
        sys.setprofile(None)
    files = [file for file in entered if file.parent.name == "models"]
    assert {file.stem for file in files} == {"t5", "stacks", "layers", "attention", "model"}
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1200
