"""What one family does and no other: compared with papers, with PyTorch's own layers and with formulas."""

import pytest
import torch
from torch import nn

from pretrain.models.attention import AttentionInputs
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.models.modern import ends_of_inputs
from tests.pretrain.exported import randomise
from tests.pretrain.small_models import VOCABULARY, as_at_the_start, ids, made, placed
from tests.tables import each

# The vanilla Transformer


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


# BART


def test_padding_learns_as_an_output_and_not_as_an_input():
    model = made("bart", pad_id=1, eos_id=2)
    model.encode(torch.tensor([[5, 1, 6]])).sum().backward()
    assert not model.embedding.weight.grad[1].any()
    assert model.embedding.weight.grad[5].any()
    assert not as_at_the_start("bart", pad_id=1, eos_id=2).embedding.weight[1].any()
    assert as_at_the_start("bart", pad_id=2, eos_id=2).embedding.weight[2].any()  # a mark that pads too is learnt


# A decoder with subtracted positions


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


# T5Gemma and T5Gemma 2


def test_flops_of_unequal_stacks():
    """Encoder: 3 layers of width 48, heads 4 · 16; decoder: 4 of width 32, heads 4 · 8, keys and values 2 · 8."""
    model = as_at_the_start("t5gemma, unbalanced", sliding_window=10)
    encoder = 4 * 48 * 64 + 3 * 48 * 48
    decoder = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    pairs = {"encoder": 100**2 + 2 * 100 * 21, "decoder": 2 * 50**2 + 2 * 50 * 10}
    assert flops_by_part(model, Sizes.of_example(100, 50)) == {
        "encoder": 6 * 3 * encoder * 100 + 12 * 64 * pairs["encoder"],
        "decoder": 6 * 4 * decoder * 50 + 12 * 32 * pairs["decoder"],
        "cross-attention": 4 * (6 * (2 * 32 * 32 * 50 + 2 * 48 * 16 * 100) + 12 * 32 * 100 * 50),
        "head": 6 * VOCABULARY * 32 * 50,
    }


# The modern T5


def test_targets_stand_after_the_last_token_of_their_input():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert ends_of_inputs(4, AttentionInputs(mask)).tolist() == [[3], [4], [0]]


def turned(x, first, base=1e4):
    """Rotary positions of x (heads, length, width) from `first` on, as products of complex numbers in fp64."""
    one, other = x.double().chunk(2, dim=-1)
    width = one.size(-1)
    angles = (first + torch.arange(x.size(1), dtype=torch.float64))[:, None] * base ** (-torch.arange(width) / width)
    found = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([found.real, found.imag], dim=-1)


@torch.no_grad()
def test_positions_of_cross_attention_go_on_where_those_of_the_input_end():
    """Against the formula: 7 inputs stand at 0 … 6, and the 5 targets at 7 … 11."""
    model = randomise(as_at_the_start("modern", qk_norm=False)).double()
    attention = model.decoder.layers[0].cross_attention
    seen = {}
    attention.o.register_forward_pre_hook(lambda _, given: seen.update(context=given[0]))
    attention.q.register_forward_hook(lambda _, given, out: seen.update(queries=out))
    states = model.encode(ids(1, 7))
    model.decode(ids(1, 5, seed=1), states)
    queries, keys, values = (
        one[0].unflatten(-1, (-1, 8)).transpose(0, 1)
        for one in (seen["queries"], attention.k(states), attention.v(states))
    )
    keys, values = (one.repeat_interleave(2, dim=0) for one in (keys, values))
    weights = (turned(queries, 7) @ turned(keys, 0).mT / 8**0.5).softmax(dim=-1)
    expected = (weights @ values).transpose(0, 1).flatten(1)
    torch.testing.assert_close(seen["context"][0], expected, rtol=0, atol=1e-5)


# BERT


def batch_of_bert():
    """Every third token is predicted; the second text begins in the middle."""
    labels = ids(3, 12, seed=1)
    labels[:, torch.arange(12) % 3 != 1] = -100
    return {
        "encoder_input_ids": ids(3, 12),
        "labels": labels,
        "token_type_ids": (torch.arange(12) >= 6).long().expand(3, 12),
        "next_sentence_labels": torch.arange(3) % 2,
    }


@pytest.fixture(scope="module")
def bert(device):
    return placed(made("bert").float(), device)


def test_logits_are_made_for_predicted_tokens_alone(bert):
    seen = []
    hook = bert.lm_head.register_forward_hook(lambda module, inputs, losses: seen.append(inputs[0].shape[:-1]))
    batch = batch_of_bert()
    bert(**batch)
    hook.remove()
    assert seen == [((batch["labels"] != -100).sum(),)]


def test_a_batch_without_a_predicted_token_costs_nothing(bert):
    """A batch of damaged rows alone has no next sentences either, yet other ranks wait for its gradients."""
    losses = bert(ids(3, 12), torch.full((3, 12), -100))
    assert {name: values.tolist() for name, values in losses.items()} == {
        "labels": [[0.0] * 12] * 3,
        "next_sentence_labels": [0.0] * 3,
    }
    bert.zero_grad()
    sum(values.sum() for values in losses.values()).backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in bert.parameters())


def test_the_z_loss_is_of_tokens_and_of_training_only():
    model, batch = made("bert", z_loss=0.1), batch_of_bert()
    evaluated, trained = model(**batch), model.train()(**batch)
    counted = batch["labels"] != -100
    assert (trained["labels"][counted] > evaluated["labels"][counted]).all()
    assert torch.equal(trained["next_sentence_labels"], evaluated["next_sentence_labels"])
