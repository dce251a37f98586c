"""The decoder-only model: published sizes, the start, subtracted positions, FLOPs."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from pretrain.models import DecoderOnlyConfig, build, outline
from pretrain.models.flops import Sizes, count_flops
from tests.pretrain.exported import randomise
from tests.pretrain.small_models import DECODERS, ids
from tests.tables import each

SIZES = {"vocab_size": 300, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2}


def tiny(**changes):
    return DecoderOnlyConfig(**{**SIZES, "max_positions": 64, **changes})


def shipped(name):
    return outline(DecoderOnlyConfig(**yaml.safe_load(Path(f"configs/models/{name}.yaml").read_text())["model"]))


@each(
    "name, d_model, expected",
    [("decoder-only-yan2024-16m", 160, 16_036_800), ("decoder-only-yan2024-15m", 156, 15_441_192)],
)
def test_parameters_of_the_baselines_of_yan_2024(name, d_model, expected):
    model = shipped(name)
    assert model.num_parameters() - model.decoder.positions.weight.numel() == expected
    assert 50_257 * d_model + 26 * (12 * d_model**2 + 2 * d_model) + d_model == expected
    assert all("bias" not in parameter for parameter, _ in model.named_parameters())


def test_standard_deviations_at_the_start():
    torch.manual_seed(0)
    model = build(tiny(d_model=256, d_ff=1024, vocab_size=2000, num_layers=8))
    layer = model.decoder.layers[3]
    for weight in (model.embedding.weight, layer.attention.q.weight, layer.feed_forward.wi.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.decoder.positions.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (layer.attention.o.weight, layer.feed_forward.wo.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert layer.attention.q.bias.abs().max() == 0


@each("norm", [False, True])
def test_the_position_of_the_next_token_is_subtracted_from_the_output(norm):
    """Logits are (final_norm(h) − table[1..T]) · embeddingᵀ, with a layer norm of the difference if asked for; so a
    model that doesn't subtract gives h, and the rest follows by hand."""
    model, plain = (
        randomise(build(tiny(**changes)), std=0.3)
        for changes in ({"subtract_positions": "with_norm" if norm else "without_norm"}, {})
    )
    weights = model.state_dict()
    assert weights["decoder.positions.weight"].shape == (65, 32)  # one row more than tokens
    shared = {name: weight for name, weight in weights.items() if "subtracted" not in name}
    plain.load_state_dict({**shared, "decoder.positions.weight": weights["decoder.positions.weight"][:64]})
    inputs = ids(2, 9)
    x = plain.decoder(plain.embedding(inputs)) - weights["decoder.positions.weight"][1:10]
    if norm:
        gain, bias = (weights[f"decoder.subtracted_norm.{kind}"] for kind in ("weight", "bias"))
        x = gain * (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() + bias
    torch.testing.assert_close(model.decode(inputs), x @ weights["embedding.weight"].T, rtol=0, atol=1e-4)


def test_flops_of_grouped_heads_and_windows():
    """Per layer q and o of 32 · 48, k and v of 32 · 24, and 3 · 32 · 64 weights; the head has 300 · 32. Pairs have 12
    for each of 48 units: 100 · 100 where the row is seen, 100 · 4 in a window of 4."""
    model = outline(DecoderOnlyConfig(**{**DECODERS["gemma 2"], **SIZES, "num_layers": 4}))
    weights = 4 * (2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 64) + 300 * 32
    pairs = 2 * 100**2 + 2 * 100 * 4
    assert count_flops(model, Sizes.of_example(100, 100)) == 6 * weights * 100 + 12 * 48 * pairs


def test_flops_of_gpt2_small():
    """6 for each of 12 layers' 12 d² weights and the output matrix, and 12 d for each pair of positions in each
    layer."""
    d, layers, length = 768, 12, 1024
    expected = 6 * (layers * 12 * d**2 + 50_257 * d) * length + 12 * d * layers * length**2
    assert count_flops(shipped("gpt2-small"), Sizes.of_example(length, length)) == expected
