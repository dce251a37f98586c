"""The decoder-only model: published sizes, causality, packing, padding, caches."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pretrain.models import DecoderOnlyConfig, build, outline
from pretrain.models.model import Sizes
from tests.pretrain.placed import placed
from tests.slow import slow

POSITIONS = ["learned", "rotary", "alibi", "sinusoidal"]
SIZES = {"vocab_size": 300, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2}


def tiny(positions="learned", **changes):
    limit = {"max_positions": 64} if positions == "learned" else {}
    return DecoderOnlyConfig(**{**SIZES, **limit, "positions": positions, **changes})


def ids(*shape, seed=0, vocab_size=300):
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def made(positions="learned", **changes):
    """A model whose weights are large enough for every part of it to matter."""
    torch.manual_seed(0)
    model = build(tiny(positions, **changes)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    return model


LLAMA = {"num_key_value_heads": 2, "norm": "rms", "activation": "swiglu", "biases": False}
GEMMA = {**LLAMA, "norm": "rms_around_one", "norm_after": True, "activation": "geglu", "scale_embedding": True}
# Windows of 4 tokens: most rows of these tests are longer.
ROTARY = {
    "llama": {**LLAMA, "tie_embeddings": False, "rope_base": 5e5},
    "gemma 2": {
        **GEMMA,
        "head_dim": 12,
        "sliding_window": 4,
        "full_attention_every": 2,
        "attention_softcap": 5.0,
        "output_softcap": 3.0,
    },
    "gemma 3": {**GEMMA, "qk_norm": True, "sliding_window": 4, "full_attention_every": 2, "window_rope_base": 1e3},
}


FIRST = ("learned", "alibi", "subtracted, with norm", "gemma 2")
OTHERS = [name for name in (*POSITIONS, "subtracted", *ROTARY) if name not in FIRST]


@pytest.fixture(params=[*FIRST, *slow(*OTHERS)], scope="module")
def model(request, device):
    if request.param in POSITIONS:
        return placed(made(request.param), device)
    if request.param in ROTARY:
        return placed(made("rotary", **ROTARY[request.param]), device)
    return placed(made(subtract_positions="with_norm" if "norm" in request.param else "without_norm"), device)


def shipped(name):
    return outline(DecoderOnlyConfig(**yaml.safe_load(Path(f"configs/models/{name}.yaml").read_text())["model"]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-270m", 268_098_176),
    ],
)
def test_parameters_of_published_models(name, expected):
    assert shipped(name).num_parameters() == expected


@pytest.mark.parametrize(
    ("name", "d_model", "expected"),
    [("decoder-only-yan2024-16m", 160, 16_036_800), ("decoder-only-yan2024-15m", 156, 15_441_192)],
)
def test_parameters_of_the_baselines_of_yan_2024(name, d_model, expected):
    model = shipped(name)
    assert model.num_parameters() - model.decoder.positions.weight.numel() == expected
    assert 50_257 * d_model + 26 * (12 * d_model**2 + 2 * d_model) + d_model == expected
    assert all("bias" not in parameter for parameter, _ in model.named_parameters())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("d_model", "vocab_size", "num_layers"), [(64, 1000, 2), (512, 8000, 4)])
def test_first_loss_is_that_of_a_uniform_guess(positions, d_model, vocab_size, num_layers):
    torch.manual_seed(0)
    sizes = {"d_model": d_model, "d_ff": 4 * d_model, "vocab_size": vocab_size, "num_layers": num_layers}
    model = build(tiny(positions, **sizes))
    with torch.no_grad():
        losses = model(ids(4, 40, vocab_size=vocab_size), ids(4, 40, seed=1, vocab_size=vocab_size))["labels"]
    assert losses.mean().item() == pytest.approx(math.log(vocab_size), abs=0.3)


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


def test_the_loss_is_the_cross_entropy_of_the_logits(model):
    inputs, labels = ids(2, 9), ids(2, 9, seed=1)
    labels[0, 4:] = -100
    expected = torch.nn.functional.cross_entropy(model.decode(inputs).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(model(inputs, labels)["labels"], expected, rtol=0, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(length=st.integers(2, 30), data=st.data())
@pytest.mark.parametrize("masked", [False, True])
def test_a_token_changes_nothing_before_it(model, masked, length, data):
    changed = data.draw(st.integers(1, length - 1))
    inputs = ids(2, length)
    others = inputs.clone()
    others[:, changed] = (others[:, changed] + 7) % 300
    mask = torch.ones(2, length) if masked else None
    before, after = model.decode(inputs, attention_mask=mask), model.decode(others, attention_mask=mask)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=0, atol=1e-4)
    assert (before[:, changed] != after[:, changed]).any()


def packed(lengths, width):
    """A row of examples with these `lengths`: (inputs, labels, segments, positions), each (1, width)."""
    row = torch.zeros(4, 1, width, dtype=torch.long)
    row[1] = -100
    start = 0
    for number, length in enumerate(lengths):
        there = slice(start, start + length)
        row[0, 0, there], row[1, 0, there] = ids(length, seed=number), ids(length, seed=100 + number)
        row[2, 0, there], row[3, 0, there] = number + 1, torch.arange(length)
        start += length
    return row


def gradients(model, losses):
    model.zero_grad()
    losses.sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 3))
def test_packed_examples_have_the_losses_and_gradients_of_each_alone(model, lengths, padding):
    inputs, labels, segments, positions = packed(lengths, sum(lengths) + padding)
    mask = (segments > 0).long()
    attention = {"encoder_attention_mask": mask, "encoder_segment_ids": segments, "encoder_positions": positions}
    together = model(inputs, labels, **attention)["labels"]
    alone = [
        model(inputs[segments == number][None], labels[segments == number][None])["labels"][0]
        for number in range(1, len(lengths) + 1)
    ]
    torch.testing.assert_close(together[0, : sum(lengths)], torch.cat(alone), rtol=1e-5, atol=1e-4)
    expected = gradients(model, torch.cat(alone))
    for name, found in gradients(model, together).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("norm", [False, True])
def test_the_position_of_the_next_token_is_subtracted_from_the_output(norm):
    """Logits are (final_norm(h) − table[1..T]) · embeddingᵀ, with a layer norm of the difference if asked for; so a
    model that doesn't subtract gives h, and the rest follows by hand."""
    model, plain = made(subtract_positions="with_norm" if norm else "without_norm"), made()
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


def test_padding_before_a_prompt_changes_nothing(model):
    inputs = ids(2, 9)
    padded = torch.cat([ids(2, 4, seed=5), inputs], dim=1)
    mask = torch.cat([torch.zeros(2, 4), torch.ones(2, 9)], dim=1)
    found = model.decode(padded, attention_mask=mask)[:, 4:]
    torch.testing.assert_close(found, model.decode(inputs), rtol=0, atol=1e-4)


def test_padding_after_a_text_costs_nothing(model):
    inputs, labels = ids(2, 12), ids(2, 12, seed=1)
    labels[:, 9:] = -100
    mask = (labels != -100).long()
    losses = model(inputs, labels, encoder_attention_mask=mask)["labels"]
    torch.testing.assert_close(losses[:, :9], model(inputs[:, :9], labels[:, :9])["labels"], rtol=0, atol=1e-4)
    assert losses[:, 9:].unique().tolist() == [0.0]


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 19), max_size=5, unique=True))
def test_a_cache_changes_no_logits(model, cuts):
    """Prompts of 20 and 13 tokens in one batch, fed in pieces of any length."""
    inputs, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    for given_mask in (None, mask):
        cache, pieces = model.new_cache(), []
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 20], strict=True):
            so_far = None if given_mask is None else given_mask[:, :end]
            pieces.append(model.decode(inputs[:, start:end], cache, so_far))
        whole = model.decode(inputs, attention_mask=given_mask)
        real = mask.bool() if given_mask is not None else torch.ones(2, 20, dtype=torch.bool)
        torch.testing.assert_close(torch.cat(pieces, dim=1)[real], whole[real], rtol=0, atol=1e-4)


def test_a_row_of_padding_alone_gives_finite_gradients(model):
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    labels = torch.tensor([[5, 1, 7], [-100, -100, -100]])
    losses = model(ids(2, 3), labels, encoder_attention_mask=mask)["labels"]
    assert all(gradient.isfinite().all() for gradient in gradients(model, losses).values())


def test_positions_matter(model):
    """Without positions, the last token would see the same whatever the order of the tokens before it."""
    inputs = ids(1, 8)
    turned = torch.cat([inputs[:, :7].flip(1), inputs[:, 7:]], dim=1)
    assert (model.decode(inputs)[:, -1] - model.decode(turned)[:, -1]).abs().max() > 0.01


def test_dropout_belongs_to_training():
    model = made(dropout_rate=0.2)
    batch = ids(2, 5), ids(2, 5, seed=1)
    assert not torch.equal(model.train()(*batch)["labels"], model(*batch)["labels"])
    assert torch.equal(model.eval()(*batch)["labels"], model(*batch)["labels"])


def test_bfloat16_weights_give_nearly_the_same_losses():
    torch.manual_seed(0)
    for positions in POSITIONS:
        model = build(tiny(positions)).eval()
        exact = model(ids(4, 30), ids(4, 30, seed=1))["labels"]
        rounded = model.bfloat16()(ids(4, 30), ids(4, 30, seed=1))["labels"]
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_graph_is_whole_for_the_compiler(positions):
    model = made(positions)
    batch = ids(2, 9), ids(2, 9, seed=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch)["labels"], model(*batch)["labels"], rtol=0, atol=1e-4)


def test_flops_of_grouped_heads_and_windows():
    """Per layer q and o of 32 · 48, k and v of 32 · 24, and 3 · 32 · 64 weights; the head has 300 · 32. Pairs have 12
    for each of 48 units: 100 · 100 where the row is seen, 100 · 4 in a window of 4."""
    model = outline(tiny("rotary", **{**ROTARY["gemma 2"], "num_layers": 4}))
    weights = 4 * (2 * 32 * 48 + 2 * 32 * 24 + 3 * 32 * 64) + 300 * 32
    pairs = 2 * 100**2 + 2 * 100 * 4
    assert model.flops(Sizes.of_example(100, 100)) == 6 * weights * 100 + 12 * 48 * pairs


def test_flops_of_gpt2_small():
    """6 for each of 12 layers' 12 d² weights and the output matrix, and 12 d for each pair of positions in each
    layer."""
    d, layers, length = 768, 12, 1024
    expected = 6 * (layers * 12 * d**2 + 50_257 * d) * length + 12 * d * layers * length**2
    assert shipped("gpt2-small").flops(Sizes.of_example(length, length)) == expected


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"num_heads": 5}, "5 doesn't divide d_model 32"),
        ({"max_positions": None}, "max_positions is missing"),
        ({"positions": "rotary"}, "rotary positions have no limit"),
        ({"positions": "rotary", "max_positions": None, "num_heads": 32}, "heads of even width"),
        ({"positions": "alibi", "max_positions": None, "subtract_positions": "with_norm"}, "needs learned positions"),
        ({"family": "t5"}, "decoder_only"),
        ({"n_layers": 3}, "n_layers"),
        ({"num_key_value_heads": 3}, "3 doesn't divide num_heads 4"),
        ({"full_attention_every": 2}, "full_attention_every: needs a sliding_window"),
        ({"rope_base": 1e6}, "rope_base: needs rotary positions"),
        ({"activation": "silu"}, "activation"),
    ],
)
def test_an_impossible_config_is_refused(wrong, expected):
    with pytest.raises(ValidationError, match=expected):
        DecoderOnlyConfig(**{**SIZES, "max_positions": 64, **wrong})
