"""Every family's export, run in transformers and imported again, over the settings of the family.

transformers loads and runs what `export` wrote as a user would: with its own choice of attention, with and without
masks and caches. Losses, logits, gradients and greedy texts are the same.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.config.models import StackConfig
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import padded
from pretrain.export import export, hf_model_of, load_state, read, to_hf
from pretrain.models import FAMILIES, build, parse
from pretrain.models.state_dict_adapter import hf_models
from tests.support import small_models as small
from tests.support.exported import assert_gradients_agree, in_transformers, randomise
from tests.support.slow import slow
from tests.support.small_models import AUTOREGRESSIVE_VARIANTS, STACKS, as_at_the_start, ids, logits_of, placed
from tests.support.tables import each

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("modules_of_transformers")

ONE = {**small.WIDTHS, "num_layers": 2}
STACK = {**ONE, "num_key_value_heads": 2}
WIDER = {**ONE, "d_model": 48, "head_dim": 8, "num_layers": 3, "query_pre_attn_scalar": 24}
MULTIPLE = {"pad_vocab_to_multiple_of": 128}
MUP = {"mup": {"base_width": 16}}
# Texts are longer than these windows.
ALL_LOCAL = {"sliding_window": 4, "full_attention_every": None}
NO_WINDOW = {"sliding_window": None, "full_attention_every": None}
RMS = {**small.LLAMA, "layer_norm_epsilon": 1e-6, "rope_base": 5e5}
GEMMA = {**small.GEMMA, "layer_norm_epsilon": 1e-6}
LOCAL = {"sliding_window": 5, "full_attention_every": 2, "head_dim": 16}
CAPS = {"output_softcap": 3.0, "query_pre_attn_scalar": 24}
GEMMA2 = {**GEMMA, **LOCAL, **CAPS, "attention_softcap": 5.0}
GEMMA3 = {**GEMMA, **LOCAL, "qk_norm": True, "rope_base": 1e6, "window_rope_base": 1e4}
T5GEMMA = {"encoder": STACK, "decoder": STACK, "sliding_window": 5, "attention_softcap": 5.0, "output_softcap": 3.0}
T5GEMMA2 = {**STACK, "sliding_window": 5, "full_attention_every": 2}
MODERN = {"encoder": STACK, "decoder": STACK}
DOUBLE_DECODER = {**STACKS, "block_length": 3}
BIDIRECTIONAL = {**ONE, "max_positions": 64}
# the settings of each family's models in transformers
BY_FAMILY: dict[str, dict[str, dict[str, Any]]] = {
    "t5": {
        "T5 v1.1": STACKS | {"d_kv": 8},
        "T5 v1.0": STACKS | {"d_kv": 16, "feed_forward": "relu", "tie_embeddings": True} | MULTIPLE,
        "T5, tied": STACKS
        | {"d_kv": 8, "tie_embeddings": True, "scale_outputs": False, "layer_norm_epsilon": 1e-3}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "num_encoder_layers": 3},
        "umT5": STACKS
        | {"d_kv": 8, "relative_attention_in_every_layer": True, "scale_outputs": True, "num_decoder_layers": 3},
        "T5, UL2's layers": STACKS | {"d_kv": 8, "feed_forward": "gated-silu"},
        "T5, scaled": STACKS | {"d_kv": 8, "scale_outputs": True, "num_decoder_layers": 3} | MUP,
    },
    "bart": {
        "BART": STACKS | {"max_positions": 64},
        "BART, other": STACKS
        | {"max_positions": 40, "scale_embedding": True, "activation": "gelu_tanh", "num_decoder_layers": 3}
        | MULTIPLE,
        "BART, ReLU": STACKS | {"activation": "relu", "num_encoder_layers": 3} | MUP,
    },
    "t5gemma": {
        "T5Gemma": T5GEMMA,
        "T5Gemma, unequal, from padding": T5GEMMA | {"encoder": WIDER, "bos_id": None} | MULTIPLE,
        "T5Gemma, all local": T5GEMMA
        | ALL_LOCAL
        | {"decoder": ONE | {"num_layers": 3}, "rope_base": 1e5, "rope_factor": 2.5},
        "T5Gemma, no window": T5GEMMA | NO_WINDOW | {"attention_softcap": None, "output_softcap": None},
        "T5Gemma, muP, from EOS": T5GEMMA | MUP | {"layer_norm_epsilon": 1e-3, "bos_id": 1},
    },
    "t5gemma2": {
        "T5Gemma 2": T5GEMMA2,
        "T5Gemma 2, all local": T5GEMMA2 | ALL_LOCAL | {"head_dim": 16, "window_rope_base": None} | MULTIPLE,
        "T5Gemma 2, no window": T5GEMMA2 | NO_WINDOW | {"window_rope_base": None, "rope_base": 1e5},
        "T5Gemma 2, other": T5GEMMA2
        | {"num_key_value_heads": None, "query_pre_attn_scalar": 24, "layer_norm_epsilon": 1e-3, "rope_factor": 8.0}
        | MUP,
    },
    "decoder_only": {
        "GPT-2": ONE | {"max_positions": 64},
        "GPT-2, no biases": ONE | {"max_positions": 64, "biases": False, "activation": "relu"} | MULTIPLE | MUP,
        "GPT-2, GELU": ONE | {"max_positions": 40, "activation": "gelu", "layer_norm_epsilon": 1e-3},
        "Llama": RMS | {"tie_embeddings": False},
        "Llama, biases": RMS | {"biases": True, "num_key_value_heads": None, "activation": "geglu"} | MUP,
        "Llama, head_dim": RMS | {"head_dim": 16, "rope_factor": 3.0} | MULTIPLE,
        "Qwen3": RMS | {"qk_norm": True, "head_dim": 16, "rope_base": 1e6},
        "Qwen3, windows": RMS | LOCAL | {"qk_norm": True, "tie_embeddings": False},
        "Qwen3, all local": RMS | ALL_LOCAL | {"qk_norm": True, "activation": "geglu"} | MULTIPLE,
        "Gemma 2": GEMMA2,
        "Gemma 2, all local": GEMMA2 | ALL_LOCAL | MULTIPLE,
        "Gemma 2, no window": GEMMA2 | NO_WINDOW | {"attention_softcap": None, "output_softcap": None},
        "Gemma 2, other": GEMMA2
        | {"tie_embeddings": False, "num_key_value_heads": None, "activation": "swiglu", "rope_base": 1e5}
        | MUP,
        "Gemma 3": GEMMA3,
        "Gemma 3, all local": GEMMA3 | ALL_LOCAL | {"window_rope_base": None, "rope_factor": 4.0} | MULTIPLE,
        "Gemma 3, no window": GEMMA3 | NO_WINDOW | {"window_rope_base": None},
        "Gemma 3, other": GEMMA3 | CAPS | {"tie_embeddings": False, "activation": "swiglu", "rope_factor": 8.0} | MUP,
    },
    "encoder_only": {
        "BERT": BIDIRECTIONAL,
        "BERT, other": BIDIRECTIONAL
        | {"activation": "gelu_tanh", "num_token_types": 3, "layer_norm_epsilon": 1e-3}
        | MULTIPLE,
        "RoBERTa": ONE | {"num_token_types": 0, "activation": "relu"} | MUP,
    },
    "autoregressive": {
        "Yan 2024": STACKS | AUTOREGRESSIVE_VARIANTS["best"],
        **{f"Yan 2024, {name}": STACKS | given for name, given in AUTOREGRESSIVE_VARIANTS.items() if name != "best"},
        "Yan 2024, other": STACKS
        | AUTOREGRESSIVE_VARIANTS["alternate"]
        | {"d_ff": None, "bridge_norm": True, "num_cross_heads": 1, "num_decoder_layers": 3}
        | MULTIPLE,
        "Yan 2024, muP": STACKS | AUTOREGRESSIVE_VARIANTS["rotary"] | MUP,
    },
    "modern": {
        "modern": MODERN,
        **{name: small.STACKS_OF_TODAY[name] for name in ("modern, local and global", "modern, plain")},
        "modern, all local": MODERN
        | ALL_LOCAL
        | {"norm": "layer", "activation": "relu", "scale_embedding": True}
        | MULTIPLE
        | MUP,
    },
    "vanilla": {
        "vanilla": STACKS,
        "vanilla, other": STACKS | {"activation": "gelu_tanh", "num_decoder_layers": 3} | MULTIPLE | MUP,
    },
    "double_decoder": {
        "double decoder": DOUBLE_DECODER,
        "double decoder, other": DOUBLE_DECODER
        | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24, "activation": "swiglu"}
        | {"least_boundaries": 1, "most_boundaries": 4, "rope_base": 1e5, "layer_norm_epsilon": 1e-3}
        | {"num_encoder_layers": 3, "block_length": 5}
        | MULTIPLE
        | MUP,
    },
}
CASES = {name: (family, one) for family, cases in BY_FAMILY.items() for name, one in cases.items()}
# Decoders of other sizes, for test_adapt.py and checks/agreement.py.
SIZES = {"family": "decoder_only", "pad_id": 0, "eos_id": 1, "d_model": 48, "d_ff": 96, "num_layers": 4, "mup": None}
ROTARY_DECODERS = {
    name: {**CASES[name][1], **SIZES, **({"full_attention_every": 3} if name in ("Qwen3, windows", "Gemma 3") else {})}
    for name in ("Llama", "Llama, biases", "Qwen3", "Qwen3, windows", "Gemma 2", "Gemma 3")
}
# Settings that come back in transformers' terms: it has biases, of zero, and a token type, of zeros.
COME_BACK: dict[str, dict[str, Any]] = {"GPT-2, no biases": {"biases": True}, "RoBERTa": {"num_token_types": 1}}
IDS = {"vocab_size", "pad_id", "eos_id", "bos_id"}
# Settings that no model of transformers has.
NOT_THERE = {
    "t5": {"positions", "max_positions"},
    "t5gemma": {"window_rope_base"},
    "decoder_only": {"subtract_positions", "prefix_attention"},
}
PROMPTS, ANSWER = (3, 9, 6), 8


def test_the_cases_have_every_setting_that_transformers_has():
    assert BY_FAMILY.keys() == set(FAMILIES)
    for family, cases in BY_FAMILY.items():
        kind = FAMILIES[family].config
        left_out = {"family", *IDS, *kind.training_only, *kind.initial_only, *NOT_THERE.get(family, ())}
        stacks = [StackConfig.model_fields] if family in ("t5gemma", "modern") else []
        sections = [one for case in cases.values() for one in (case, *case.values()) if isinstance(one, dict)]
        tried = {name for section in sections for name in section}
        assert set().union(kind.model_fields, *stacks) - left_out <= tried, family


@pytest.fixture(scope="module")
def tokenizer(spiece):
    return Tokenizer(SentencePiece.read(spiece), ["<s>", "<mask>"], sentinels=20)


def batch(way, vocabulary):
    """Inputs of 24, 15 and 7 tokens, their mask, and labels; answers have an EOS token inside, as rows of several
    documents do."""
    lengths, places = torch.tensor([24, 15, 7])[:, None], torch.arange(24)
    mask = (places < lengths).long()
    inputs = ids(3, 24).masked_fill(mask == 0, vocabulary.pad)
    if way != "answers":
        return inputs, mask, inputs.masked_fill(mask == 0, IGNORE_INDEX)
    labels = ids(3, 18, seed=1)
    labels[:, 9] = vocabulary.eos
    return inputs, mask, labels.masked_fill(torch.arange(18) >= torch.tensor([17, 18, 3])[:, None], IGNORE_INDEX)


def loss_here(model, inputs, mask, labels, **others):
    """The mean loss of the labels that count."""
    if FAMILIES[model.config.family].generates == "continuations":
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    losses = model(inputs, labels, encoder_attention_mask=mask, **others)
    return losses["labels"].sum() / (labels != IGNORE_INDEX).sum()


def files_of(directory: Path):
    """But for the card, which has the settings of transformers' model."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "README.md"}


def loaded_by_transformers(out: Path):
    saved, _ = transformers.PreTrainedConfig.get_config_dict(out)
    (name,) = saved["auto_map"].keys() - {"AutoConfig"} if "auto_map" in saved else saved["architectures"]
    kind = getattr(transformers, name)
    loaded, report = kind.from_pretrained(out, trust_remote_code=True, output_loading_info=True)
    assert not any(report[f"{problem}_keys"] for problem in ("missing", "unexpected", "mismatched"))
    return loaded.eval()


PLAIN = [name for name in CASES if "," not in name]  # one form of each model


@each("name", [*PLAIN, *slow(*(name for name in CASES if name not in PLAIN))])
def test_an_export_computes_and_generates_the_same_and_comes_back(name, tokenizer, device, tmp_path):
    (family, settings), vocabulary = CASES[name], tokenizer.vocabulary
    marks = {"vocab_size": tokenizer.size, "pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    if "bos_id" in FAMILIES[family].config.model_fields:
        marks["bos_id"] = vocabulary.bos
    model = randomise(build(parse({"family": family, **marks, **settings})), std=0.2)
    if family == "bart":
        model.lm_head.final_logits_bias.normal_()
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    loaded = loaded_by_transformers(tmp_path / "out")
    config, state, same_tokenizer = read(tmp_path / "out")
    assert config == model.config.model_copy(update={"mup": None, **COME_BACK.get(name, {})})
    again = build(config).eval()
    again.load_state_dict(state)
    if model.config.mup is None:  # whose multipliers become part of the weights
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items() if name in state)
    export(state, config, same_tokenizer, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    loaded.save_pretrained(tmp_path / "saved")  # as users do after fine-tuning
    saved_config, saved = load_state(tmp_path / "saved")
    unknown = {"vocab_size": config.padded_vocab_size, "pad_vocab_to_multiple_of": 1}
    if family == "autoregressive":  # whose embedding loss transformers doesn't use
        unknown["embedding_loss"] = None
        state = {name: tensor for name, tensor in state.items() if not name.startswith("embedding_loss.")}
    assert saved_config == config.model_copy(update=unknown)
    assert saved.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.items())

    way = FAMILIES[family].generates
    model, again = placed(model, device), placed(again, device)
    inputs, mask, labels = batch(way, vocabulary)
    types = (torch.arange(24) > 5).long().expand(3, -1)
    for rows, given, use_cache in ((slice(None), mask, False), (slice(1), None, True)):
        told, others = {"labels": labels[rows], **({"use_cache": use_cache} if way else {})}, {}
        if getattr(config, "num_token_types", 0) > 1:
            others = {"token_type_ids": types[rows]}
            told |= others
        if not use_cache:
            loaded(input_ids=inputs, attention_mask=given, **told).loss.backward()
            loss_here(again, inputs, given, labels, **others).backward()
            assert_gradients_agree(again, loaded)
        with torch.no_grad():
            found = loaded(input_ids=inputs[rows], attention_mask=given, **told)
        counts = labels[rows] != IGNORE_INDEX
        theirs = found.logits[counts]
        assert theirs.std() > 0.1  # the comparison is not one of zeros
        for ours in (model, again):
            with torch.no_grad():
                loss = loss_here(ours, inputs[rows], given, labels[rows], **others)
                logits = logits_of(ours, inputs[rows], labels[rows], given, others.get("token_type_ids"))[counts]
            assert found.loss.item() == pytest.approx(loss.item(), abs=1e-5), use_cache
            torch.testing.assert_close(theirs, logits, rtol=0, atol=2e-5)

    if way is None:
        return
    if config.padded_vocab_size > tokenizer.size:
        never = json.loads((tmp_path / "out/generation_config.json").read_text())["suppress_tokens"]
        assert never == list(range(tokenizer.size, config.padded_vocab_size))
    once = 1 if way == "answers" else 2  # random weights repeat themselves
    settings = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "no_repeat_ngram_size": once}
    if way == "continuations":
        prompts = [ids(length, seed=length).tolist() for length in PROMPTS]
        inputs, mask = padded(prompts, vocabulary.pad, left=True)
    for use_cache, beams in itertools.product((True,) if family == "double_decoder" else (False, True), (1, 3)):
        chosen = {**settings, "num_beams": beams}
        ours = generate(model, inputs, mask, GenerationSettings(**chosen))
        assert len(ours.unique()) > 3
        theirs = loaded.generate(inputs, attention_mask=mask, do_sample=False, use_cache=use_cache, **chosen)
        assert theirs[:, -ours.size(1) :].tolist() == ours.tolist(), (use_cache, beams)


@each("name", [name for name in small.ONE_OF_EACH_FAMILY if hf_models(small.MODELS[name]["family"])[0].names])
def test_a_tensor_that_transformers_would_ignore_is_refused_by_its_name(name):
    """Beside those of a layer, inside one of its modules, and outside layers."""
    model = as_at_the_start(name, **MULTIPLE)
    hf, state = hf_model_of(model.config), model.state_dict()
    to_hf(hf, model.config, state)
    layer = next(key for key in state if re.search(r"\.0\.", key)).split(".0.")[0]
    for extra in (f"{layer}.0.adapter.weight", f"{layer}.1.feed_forward.gate.weight", "adapter.bias"):
        with pytest.raises(UserError, match=rf"^transformers' model has no place for {re.escape(extra)}$"):
            to_hf(hf, model.config, {**state, extra: torch.zeros(2)})


def config(name, **changes):
    family, settings = CASES[name]
    return parse({"family": family, "vocab_size": 500, **settings, **changes})


def test_transformers_4_finds_the_bases_of_rotations_under_its_names():
    """transformers 5 has them in `rope_parameters`, which 4 doesn't read."""

    def exported(name, **changes):
        chosen = config(name, **changes)
        return to_hf(hf_model_of(chosen), chosen, build(chosen).state_dict()).config

    assert exported("Llama", rope_base=5e5)["rope_theta"] == 5e5
    assert exported("T5Gemma", bos_id=2, rope_base=1e5)["decoder"]["rope_theta"] == 1e5
    gemma = exported("Gemma 3", rope_base=1e6, window_rope_base=2e4)
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"]) == (1e6, 2e4)
    assert "rope_scaling" not in gemma
    scaled = exported("Gemma 3", rope_factor=8.0, window_rope_base=2e4)
    assert scaled["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


@each(
    "kind, changes, expected",
    [
        ("Llama", {"output_softcap": 30.0}, "no Llama with output_softcap: 30.0"),
        ("Llama", {"sliding_window": 5}, "no Llama with sliding_window: 5"),
        ("Qwen3", {"biases": True}, "no Llama with qk_norm: true"),
        ("Qwen3", {"norm_after": True}, "no Qwen3 with norm_after: true"),
        ("Gemma 2", {"window_rope_base": 1e5}, "no Gemma 2 with window_rope_base: 100000.0"),
        ("Gemma 3", {"attention_softcap": 50.0}, "no Gemma 3 with attention_softcap: 50.0"),
        ("T5Gemma", {"window_rope_base": 1e5}, "no T5Gemma with window_rope_base: 100000.0"),
        ("Gemma 3", {"activation": "relu"}, "no Gemma 3 with activation: relu"),
        ("GPT-2", {"positions": "rotary", "max_positions": None}, "no GPT-2 with positions: rotary"),
        ("GPT-2", {"subtract_positions": "without_norm"}, "no GPT-2 with subtract_positions: without_norm"),
        ("GPT-2", {"prefix_attention": "bidirectional"}, "no GPT-2 with prefix_attention: bidirectional"),
        ("Llama", {"prefix_attention": "bidirectional"}, "no Llama with prefix_attention: bidirectional"),
    ],
)
def test_what_no_model_of_transformers_can_be_is_not_exported(kind, changes, expected):
    with pytest.raises(UserError, match=expected):
        hf_model_of(config(kind, **changes))


@torch.no_grad()
def test_inputs_beyond_4096_tokens_are_those_of_transformers(tmp_path):
    sizes = {"num_layers": 2, "full_attention_every": 2, "sliding_window": 1024, "num_heads": 2, "d_model": 16}
    model = randomise(build(config("T5Gemma 2", bos_id=2, **sizes)), std=0.1)
    reference = in_transformers(model, tmp_path)
    inputs, targets = ids(1, 4300), ids(1, 40, seed=1)
    expected = reference(input_ids=inputs, decoder_input_ids=targets).logits
    assert (model.decode(targets, model.encode(inputs)) - expected).abs().max() < 1e-5


def test_what_a_t5gemma_cannot_be_there_is_refused(tmp_path):
    for kind in ("T5Gemma", "T5Gemma 2"):
        with pytest.raises(UserError, match=r"can't generate with sliding_window: 1: its cache"):
            in_transformers(build(config(kind, sliding_window=1, bos_id=2)), tmp_path)
    for marks, expected in (
        (
            {"bos_id": None},
            "padding, id 0, is also the decoder's start: train with model.pad_vocab_to_multiple_of: 128",
        ),
        ({"bos_id": 5, "eos_id": 5, "pad_id": 5}, "padding, id 5, is also the decoder's start and EOS: train"),
    ):
        with pytest.raises(UserError, match=expected):
            in_transformers(build(config("T5Gemma", **marks)), tmp_path)


# The families that transformers lacks, loaded from the modelling files in their exports


KINDS = ["modern, local and global", "modern, plain", "vanilla", "double decoder", "Yan 2024"]


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory, modules_of_transformers):
    """For a kind: a model in which every weight matters, the directory of its export, and what transformers loads."""

    @functools.cache
    def of(kind):
        family, settings = CASES[kind]
        marks = {"vocab_size": tokenizer.size, "pad_id": tokenizer.vocabulary.pad, "eos_id": tokenizer.vocabulary.eos}
        config = parse({"family": family, **marks, **settings, "dropout_rate": 0.1})
        model, out = randomise(build(config), std=0.4), tmp_path_factory.mktemp("exported") / "out"
        export(model.state_dict(), config, tokenizer, out)
        return model, out, loaded_by_transformers(out)

    return of


@each("kind", [KINDS[0], KINDS[3], *slow(*KINDS[1:3])])
def test_every_weight_gets_a_gradient_in_training(kind, exported):
    _, _, loaded = exported(kind)
    row = ids(2, 24)
    loaded.train()
    loaded(input_ids=row, labels=row).loss.backward()
    assert all(parameter.grad.any() for _, parameter in loaded.named_parameters())
    loaded.eval().zero_grad()


@each("kind", [KINDS[0], *slow(*KINDS[1:3])])
@torch.no_grad()
def test_a_decoder_reads_rows_padded_on_the_left(kind, exported):
    _, _, loaded = exported(kind)
    inputs, targets = ids(1, 9), ids(1, 7, seed=1)
    expected = loaded(input_ids=inputs, decoder_input_ids=targets)
    shifted = torch.nn.functional.pad(targets, (3, 0))
    mask = (torch.arange(10) >= 3).long()[None]
    found = loaded(input_ids=inputs, decoder_input_ids=shifted, decoder_attention_mask=mask)
    torch.testing.assert_close(found.logits[:, 3:], expected.logits, rtol=0, atol=2e-5)


@torch.no_grad()
def test_the_double_decoder_generates_by_blocks_and_no_decoder_with_a_static_cache(exported):
    """Its cache continues with several tokens at once; without a cache, blocks would move with every token."""
    model, _, loaded = exported("double decoder")
    prompt, more = ids(2, 5), ids(2, 9, seed=1)
    ours, theirs = model.new_cache(), loaded(prompt, use_cache=True).past_key_values
    model.decode(prompt, ours)
    found = loaded(more, past_key_values=theirs)
    assert found.past_key_values.get_seq_length() == 14
    torch.testing.assert_close(found.logits, model.decode(more, ours), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="generation needs use_cache=True"):
        loaded.generate(prompt, max_new_tokens=3, use_cache=False)
    with pytest.raises(ValueError, match="static cache is not supported"):
        exported("Yan 2024")[2].generate(prompt, max_new_tokens=3, cache_implementation="static")


@each("kind", slow(KINDS[0], KINDS[3], KINDS[4]))
def test_the_directory_stands_on_its_own(kind, exported, tokenizer, tmp_path):
    """It works in another process without our packages, as for anyone who receives the directory."""
    model, out, _ = exported(kind)
    answers = FAMILIES[model.config.family].generates == "answers"
    code = (
        "import sys, transformers; sys.modules.update(pretrain=None, data_pipeline=None)\n"
        f"kind = transformers.AutoModelFor{'Seq2Seq' if answers else 'Causal'}LM\n"
        f"model = kind.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        f"tokenizer = transformers.AutoTokenizer.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        "inputs = tokenizer('You may reproduce', return_tensors='pt')\n"
        "print(inputs.input_ids[0].tolist(), model.generate(**inputs, do_sample=False, max_new_tokens=5)[0].tolist())"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    given = [*tokenizer.encode(["You may reproduce"])[0], *([tokenizer.vocabulary.eos] if answers else [])]
    generated = generate(model, torch.tensor([given]), None, GenerationSettings(max_new_tokens=5))[0].tolist()
    read = [model.config.pad_id] if answers else given
    assert done.stdout.strip().splitlines()[-1] == f"{given} {[*read, *generated]}"
