"""What one family does and no other: compared with papers, with PyTorch's own layers and with formulas."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pretrain.models
from data_pipeline.base.config_file import check, load
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.example_rows import balanced
from data_pipeline.corpus.objectives.language_modelling import PrefixLM
from data_pipeline.corpus.objectives.text_to_text import InOneRow
from data_pipeline.loading.batches import as_batch
from pretrain.config.models import EncoderOnlyConfig
from pretrain.config.run_config import DataSection
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import padded
from pretrain.models import build, parse
from pretrain.models.attention import AttentionInputs
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.models.functional.attention_backends import Visibility, toeplitz
from pretrain.models.modern import ends_of_inputs
from pretrain.models.positions import linear_bias, linear_bias_slopes, sinusoids
from pretrain.models.t5 import RelativePositionBias, relative_position_bucket
from tests.support.example_rows import VOCABULARY as IDS
from tests.support.example_rows import ragged_rows
from tests.support.exported import randomise
from tests.support.small_models import MODELS, VOCABULARY, as_at_the_start, ids, made, placed
from tests.support.tables import each

# All families


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
    files = [file for file in entered if file.parent == Path(pretrain.models.__file__).parent]
    assert {file.stem for file in files} == {"t5", "stacks", "layers", "attention", "model"}
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1200


# T5


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


# Positions of several families


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


@each("family", ["t5gemma", "t5gemma2"])
def test_without_a_window_all_layers_have_full_attention(family):
    """`full_attention_every` and `window_rope_base` have defaults that need a window."""
    given = {name: value for name, value in MODELS[family].items() if name != "full_attention_every"}
    config = parse({**given, "vocab_size": VOCABULARY, "sliding_window": None})
    assert {config.window_and_rotation(layer) for layer in range(6)} == {(None, config.rotation)}
    assert parse(config.model_dump()) == config


@each("window, kinds", [(8, [True, True, True, True]), (7, [False, True, False, True])])
def test_a_causal_window_as_wide_as_the_row_is_no_window(window, kinds):
    decoder = as_at_the_start("t5gemma", sliding_window=window).decoder
    masks = decoder.masks(torch.zeros(1, 8, 32), 8, torch.arange(8), Visibility(causal=True))
    assert [mask.is_causal for mask in masks] == kinds


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
    """Every third token is predicted; the second half has another type."""
    labels = ids(3, 12, seed=1)
    labels[:, torch.arange(12) % 3 != 1] = -100
    return {
        "encoder_input_ids": ids(3, 12),
        "labels": labels,
        "token_type_ids": (torch.arange(12) >= 6).long().expand(3, 12),
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
    """A batch of damaged rows alone has no loss, yet other ranks wait for its gradients."""
    losses = bert(ids(3, 12), torch.full((3, 12), -100))
    assert {name: values.tolist() for name, values in losses.items()} == {"labels": [[0.0] * 12] * 3}
    bert.zero_grad()
    losses["labels"].sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in bert.parameters())


def test_the_z_loss_is_of_training_only():
    model, batch = made("bert", z_loss=0.1), batch_of_bert()
    evaluated, trained = model(**batch), model.train()(**batch)
    counted = batch["labels"] != -100
    assert (trained["labels"][counted] > evaluated["labels"][counted]).all()


def test_the_key_next_sentence_of_earlier_run_files_is_refused_unless_it_is_off():
    settings = {"vocab_size": 96, **MODELS["bert"]}
    off = check({**settings, "next_sentence": False}, EncoderOnlyConfig, "a")
    assert off == check(settings, EncoderOnlyConfig, "a")
    with pytest.raises(UserError, match=r"^a: next_sentence: gone; leave it out: an encoder learns from masked tokens"):
        check({**settings, "next_sentence": True}, EncoderOnlyConfig, "a")


# A decoder whose inputs see one another: prefix LM without an encoder


PREFIX_LM = {"family": "decoder_only", "d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "init_std": 0.3}
ROTARY = {"positions": "rotary", "norm": "rms", "qk_norm": True, "activation": "swiglu", "biases": False}
LEARNED = {"positions": "learned", "max_positions": 128}


def prefix_lm(prefix="bidirectional", **settings):
    torch.manual_seed(0)
    ids = {"vocab_size": IDS.size, "pad_id": IDS.pad, "eos_id": IDS.eos}
    return build(parse({**PREFIX_LM, **ids, "prefix_attention": prefix, **settings})).eval()


def examples(lengths=(30, 9, 17, 30)):
    rows, keys = ragged_rows([*lengths])
    return InOneRow(of=PrefixLM(length=30)).apply(rows, keys, IDS, {})


@each("settings", [ROTARY, LEARNED])
def test_losses_depend_on_every_token_of_the_prefix_and_on_no_later_one(settings):
    """The gradient of each loss with respect to the tokens' vectors says what it has seen."""
    subject = prefix_lm(**settings)
    batch = as_batch(examples((30,)), IDS.pad)
    prefix = int(batch["prefix_mask"].sum())
    vectors = subject.embedding(batch["encoder_input_ids"]).detach().requires_grad_()
    states = subject.decoder(vectors, _inputs(batch))
    weights = torch.randn(states.size(-1))  # the sum of a layer norm's output has no gradient
    for place in range(vectors.size(1)):
        (seen,) = torch.autograd.grad(states[0, place] @ weights, vectors, retain_graph=True)
        found = seen[0].abs().sum(dim=1).gt(0).nonzero().flatten().tolist()
        assert found == [*range(max(place + 1, prefix))]


def _inputs(batch):
    return AttentionInputs(**{key: value for key, value in batch.items() if key not in ("encoder_input_ids", "labels")})


def test_a_causal_decoder_reads_the_same_rows_without_seeing_ahead():
    batch = as_batch(examples(), IDS.pad)
    causal, bidirectional = prefix_lm("causal", **ROTARY), prefix_lm(**ROTARY)
    without = {name: tensor for name, tensor in batch.items() if name != "prefix_mask"}
    assert torch.equal(causal(**batch)["labels"], causal(**without)["labels"])
    assert not torch.allclose(bidirectional(**batch)["labels"], causal(**batch)["labels"])


@each("settings", [ROTARY, LEARNED])
def test_packed_rows_give_the_same_losses(settings):
    subject, apart = prefix_lm(**settings), examples()
    alone = subject(**as_batch(apart, IDS.pad))["labels"]
    packed = subject(**as_batch(balanced(apart, 2), IDS.pad))["labels"]
    losses = [np.sort(found[found != 0].detach().numpy()) for found in (alone, packed)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_generation_reads_a_prompt_as_training_reads_inputs():
    """The likeliest tokens after prompts of different lengths are those that the loss of the whole row prefers."""
    subject = prefix_lm(**ROTARY)
    prompts = [[5, 9, 11, 4, 1], [7, 8, 1]]
    ids, mask = padded(prompts, IDS.pad, left=True)
    settings = GenerationSettings(max_new_tokens=6)
    written = generate(subject, ids, mask, settings).tolist()
    for prompt, row in zip(prompts, written, strict=True):
        for count, token in enumerate(row):
            whole = torch.tensor([[*prompt, *row[:count]]])
            seen = (torch.arange(whole.size(1)) < len(prompt)).long()[None]
            inputs = {"prefix_mask": seen}
            logits = subject.lm_head(subject.decoder(subject.embedding(whole), _inputs(inputs)))[0, -1]
            assert int(logits[: IDS.size].argmax()) == token
            if token == IDS.eos:
                break


def test_another_objective_in_the_row_starts_afresh(tmp_path):
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("train: [{corpus: c}]\nobjective: {name: in_one_row, of: {name: prefix_lm, length: 30}}")
    child.write_text("extends: base.yaml\nobjective: {of: {name: text_to_text, targets_length: 9}}")
    objective = load(child, [], DataSection).objective
    assert (objective.of.name, objective.of.targets_length, objective.of.inputs_length) == ("text_to_text", 9, 512)
