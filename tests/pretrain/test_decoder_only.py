"""The decoder-only model: published sizes, subtracted positions."""

from pathlib import Path

import torch
import yaml

from pretrain.models import DecoderOnlyConfig, outline
from tests.pretrain.small_models import ids, made
from tests.tables import each


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


@each("norm", [False, True])
def test_the_position_of_the_next_token_is_subtracted_from_the_output(norm):
    """Logits are (final_norm(h) − table[1..T]) · embeddingᵀ, with a layer norm of the difference if asked for; so a
    model that doesn't subtract gives h, and the rest follows by hand."""
    model = made("decoder_only, subtracted, with norm" if norm else "decoder_only, subtracted").float()
    plain = made("decoder_only").float()
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
