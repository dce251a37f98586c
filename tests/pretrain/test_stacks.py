"""The encoder-decoders of today's layers: packing, caches, empty rows, the start, and positions of the modern T5."""

import math

import pytest
import torch
from pydantic import ValidationError

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.models import ModernConfig, build, outline, parse
from pretrain.models.attention_masks import AttentionInputs
from pretrain.models.loss import shift_right
from pretrain.models.stacks import ends_of_inputs, positions_in_segments
from tests.pretrain.exported import randomise
from tests.pretrain.test_t5gemma import KINDS as OF_TRANSFORMERS
from tests.pretrain.test_t5gemma import STACK, WIDER, batch, ids

MODERN = {"family": "modern", "vocab_size": 500, "encoder": STACK, "decoder": STACK}
KINDS = {
    **OF_TRANSFORMERS,
    "modern": MODERN,
    "modern, local and global": {
        **MODERN,
        "encoder": WIDER,
        "tie_embeddings": "output",
        "sliding_window": 4,
        "full_attention_every": 3,
        "window_rope_base": 1e3,
        "norm_after": True,
    },
    "modern, plain": {
        **MODERN,
        "tie_embeddings": "none",
        "cross_rotation": False,
        "qk_norm": False,
        "activation": "relu",
        "attention_softcap": 5.0,
        "output_softcap": 3.0,
        "scale_embedding": True,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return randomise(build(parse(KINDS[request.param])))


def test_packed_examples_have_the_losses_and_gradients_of_each_alone(model):
    lengths, targets = (6, 9, 1), (7, 2, 8)
    row = torch.zeros(6, 1, 20, dtype=torch.long)
    row[1] = IGNORE_INDEX
    alone = []
    model.zero_grad()
    start, begin = 0, 0
    for number, (length, count) in enumerate(zip(lengths, targets, strict=True)):
        inputs, labels = ids(1, length, seed=number), ids(1, count, seed=10 + number)
        here, there = slice(start, start + length), slice(begin, begin + count)
        row[0, :, here], row[1, :, there] = inputs, labels
        row[2, :, here], row[3, :, there] = number + 1, number + 1
        row[4, :, here], row[5, :, there] = torch.arange(length), torch.arange(count)
        losses = model(inputs, labels)["labels"]
        losses.sum().backward()
        alone.append((there, losses))
        start, begin = start + length, begin + count
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    inputs, labels, of_inputs, of_targets, positions, target_positions = row
    together = model(
        inputs,
        labels,
        encoder_attention_mask=(of_inputs > 0).long(),
        encoder_segment_ids=of_inputs,
        decoder_segment_ids=of_targets,
        encoder_positions=positions,
        decoder_positions=target_positions,
    )["labels"]
    together.sum().backward()
    for there, losses in alone:
        torch.testing.assert_close(together[:, there], losses, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        largest = float(expected[name].abs().max())
        assert float((parameter.grad - expected[name]).abs().max()) < 1e-4 * largest, name


@torch.no_grad()
def test_a_cache_changes_no_logits(model):
    inputs, mask, labels = batch()
    read = shift_right(labels, model.config.decoder_start_id, pad_id=0)
    states = model.encode(inputs, mask)
    whole = model.decode(read, states, mask)
    cache, pieces = model.new_cache(), []
    for start, end in ((0, 1), (1, 8), (8, 9), (9, 20)):
        pieces.append(model.decode(read[:, start:end], states, mask, cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-5)


def test_an_empty_input_and_empty_targets_give_finite_gradients(model):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    labels = torch.tensor([[5, 1, 7], [6, 1, IGNORE_INDEX], [IGNORE_INDEX] * 3])
    model.zero_grad()
    model(ids(3, 3), labels, encoder_attention_mask=mask)["labels"].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_first_loss_and_initial_values(kind):
    torch.manual_seed(0)
    model = build(parse(KINDS[kind]))
    with torch.no_grad():
        loss = model(ids(4, 40), ids(4, 40, seed=1))["labels"].mean().item()
    assert loss == pytest.approx(math.log(500), abs=0.1)
    layer = model.decoder.layers[0]
    std = 0.02 / 12**0.5 if kind.startswith("modern") else 0.02
    assert layer.self_attention.o.weight.std().item() == pytest.approx(std, rel=0.1)
    if not kind.startswith("modern"):
        assert all(not value.any() for name, value in model.named_parameters() if "norm" in name)


def test_matrices_are_shared_as_configured():
    shared = {
        tied: outline(parse({**MODERN, "tie_embeddings": tied})).num_parameters() for tied in ("all", "output", "none")
    }
    assert shared["none"] - shared["output"] == shared["output"] - shared["all"] == 500 * 32


def test_positions_of_packed_inputs_worked_by_hand():
    segments, targets = torch.tensor([[1, 1, 1, 2, 0, 0]]), torch.tensor([[1, 1, 2, 2, 2, 0]])
    assert positions_in_segments(segments).tolist() == [[0, 1, 2, 0, 0, 1]]
    packed = AttentionInputs(encoder_segment_ids=segments, decoder_segment_ids=targets)
    assert ends_of_inputs(6, packed).tolist() == [[3, 3, 1, 1, 1, 2]]
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert ends_of_inputs(4, AttentionInputs(mask)).tolist() == [[3], [4], [0]]
    assert ends_of_inputs(4, AttentionInputs()) == 4


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
    model = randomise(build(parse({**MODERN, "qk_norm": False}))).double()
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


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"encoder": WIDER}, "tie_embeddings: one matrix can't be 48 wide in the encoder and 32 in the decoder"),
        ({"full_attention_every": 2}, "full_attention_every: needs a sliding_window"),
        ({"encoder": {**STACK, "head_dim": 5}}, "5 is odd"),
        ({"activation": "silu"}, "activation"),
        ({"positions": "relative"}, "positions"),
    ],
)
def test_an_impossible_config_is_refused(wrong, expected):
    with pytest.raises(ValidationError, match=expected):
        ModernConfig(**{**MODERN, **wrong})
