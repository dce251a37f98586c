"""The vanilla Transformer, compared with PyTorch's own layers."""

import torch
from torch import nn

from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start, ids


def copied(layer: nn.Module, ours: nn.Module, attentions: dict[str, str], norms: list[str]) -> nn.Module:
    """PyTorch's own layer with our weights."""
    with torch.no_grad():
        for theirs, name in attentions.items():
            attention, own = getattr(layer, theirs), getattr(ours, name)
            attention.in_proj_weight.copy_(torch.cat([own.q.weight, own.k.weight, own.v.weight]))
            attention.in_proj_bias.copy_(torch.cat([own.q.bias, own.k.bias, own.v.bias]))
            attention.out_proj.load_state_dict(own.o.state_dict())
        layer.linear1.load_state_dict(ours.feed_forward.wi.state_dict())
        layer.linear2.load_state_dict(ours.feed_forward.wo.state_dict())
        for number, name in enumerate(norms, 1):
            getattr(layer, f"norm{number}").load_state_dict(getattr(ours, name).state_dict())
    return layer


def test_logits_are_those_of_pytorchs_own_layers():
    """nn.TransformerEncoderLayer and nn.TransformerDecoderLayer are post-norm with ReLU by default."""
    model = randomise(as_at_the_start("vanilla", d_model=64, d_ff=96), std=0.1)
    inputs, targets = ids(3, 30), ids(3, 20, seed=1)
    mask = torch.ones(3, 30).long()
    mask[1, 11:] = 0

    def embedded(tokens):
        length = tokens.size(1)
        angles = torch.tensor([[p / 10_000 ** (2 * (i // 2) / 64) for i in range(64)] for p in range(length)])
        waves = torch.where(torch.arange(64) % 2 == 0, angles.sin(), angles.cos())
        return 8 * model.embedding.weight[tokens] + waves

    with torch.no_grad():
        states = embedded(inputs)
        for ours in model.encoder.layers:
            layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
            names = ["self_attention_norm", "feed_forward_norm"]
            copied(layer, ours, {"self_attn": "self_attention"}, names)
            states = layer(states, src_key_padding_mask=mask == 0)
        x = embedded(targets)
        future = nn.Transformer.generate_square_subsequent_mask(20)
        for ours in model.decoder.layers:
            layer = nn.TransformerDecoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
            attentions = {"self_attn": "self_attention", "multihead_attn": "cross_attention"}
            names = ["self_attention_norm", "cross_attention_norm", "feed_forward_norm"]
            copied(layer, ours, attentions, names)
            x = layer(x, states, tgt_mask=future, memory_key_padding_mask=mask == 0)
        expected = x @ model.embedding.weight.T
        found = model.decode(targets, model.encode(inputs, mask), mask)
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < 1e-4
