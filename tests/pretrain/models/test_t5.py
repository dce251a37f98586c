"""T5's relative positions, compared with transformers, and its values at the start."""

import itertools

import pytest
import torch

from pretrain.models import build, parse
from pretrain.models.functional.attention_backends import toeplitz
from pretrain.models.t5 import RelativePositionBias, relative_position_bucket
from tests.support.small_models import as_at_the_start, ids, logits_of
from tests.support.tables import each


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


@each("std, tied, scaled", itertools.product([1.0, 0.5], [True, False], [True, False]))
@torch.no_grad()
def test_first_logits_of_t5_have_the_deviation_asked_for_however_they_are_tied_and_scaled(std, tied, scaled):
    kind = {"tie_embeddings": tied, "scale_outputs": scaled, "init_output_std": std}
    model = as_at_the_start("t5", d_model=64, d_kv=16, vocab_size=2_000, **kind)
    rows = ids(4, 30, vocabulary=2_000)
    assert logits_of(model, rows, rows).std().item() == pytest.approx(std, rel=0.1)


def test_t5s_matrices_start_with_the_deviations_of_its_authors():
    """Mesh TensorFlow's: of queries (d_model · d_kv)^-½, since logits aren't scaled; of keys and values d_model^-½, of
    outputs (heads · d_kv)^-½."""
    torch.manual_seed(0)
    sizes = {"d_model": 256, "d_kv": 32, "num_heads": 16, "d_ff": 64, "vocab_size": 100}
    model = build(parse({"family": "t5", **sizes, "num_encoder_layers": 1, "num_decoder_layers": 1}))
    expected = {"q": (256 * 32) ** -0.5, "k": 256**-0.5, "v": 256**-0.5, "o": (16 * 32) ** -0.5}
    found = {
        name: parameter.std().item()
        for name, parameter in model.named_parameters()
        if "attention." in name and name.split(".")[-2] in expected
    }
    assert len(found) == 3 * 4
    for name, deviation in found.items():
        assert deviation == pytest.approx(expected[name.split(".")[-2]], rel=0.02), name
