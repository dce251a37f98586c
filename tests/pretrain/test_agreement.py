"""Models beside transformers' models of the same weights, and what has no such model."""

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.huggingface import hf_model_of, load_state
from pretrain.models import build, parse
from pretrain.models.model import shift_right
from pretrain.models.positions import rotary_embedding
from pretrain.models.stacks import EncoderDecoder
from tests.pretrain.exported import assert_gradients_agree, in_transformers, randomise
from tests.pretrain.placed import placed
from tests.pretrain.small_models import ENCODER_DECODERS, STACKS_OF_TODAY
from tests.tables import each

transformers = pytest.importorskip("transformers")

T5, T5_TIED = ENCODER_DECODERS["t5"], ENCODER_DECODERS["t5, tied"]
BART = {**ENCODER_DECODERS["bart"], "pad_id": 1, "eos_id": 2, "max_positions": 200}
SIZES = {"d_model": 48, "d_ff": 96, "num_heads": 4, "num_layers": 4, "positions": "rotary", "biases": False}
DECODER = {"family": "decoder_only", "pad_id": 0, "eos_id": 1, **SIZES}
GROUPED = {**DECODER, "num_key_value_heads": 2, "norm": "rms", "activation": "swiglu", "layer_norm_epsilon": 1e-6}
GEMMA = {**GROUPED, "norm": "rms_around_one", "activation": "geglu", "norm_after": True, "scale_embedding": True}
LOCAL = {"sliding_window": 5, "full_attention_every": 2, "head_dim": 16}
CAPS = {"query_pre_attn_scalar": 24, "attention_softcap": 5.0, "output_softcap": 3.0}
# the settings of each model, and its class in transformers
ROTARY_DECODERS = {
    "Llama": ({**GROUPED, "rope_base": 500_000.0, "tie_embeddings": False}, "LlamaForCausalLM"),
    "Llama, biases": ({**GROUPED, "biases": True, "num_key_value_heads": None}, "LlamaForCausalLM"),
    "Qwen3": ({**GROUPED, "qk_norm": True, "head_dim": 16, "rope_base": 1e6}, "Qwen3ForCausalLM"),
    "Qwen3, windows": ({**GROUPED, **LOCAL, "qk_norm": True, "full_attention_every": 3}, "Qwen3ForCausalLM"),
    "Gemma 2": ({**GEMMA, **LOCAL, **CAPS}, "Gemma2ForCausalLM"),
    "Gemma 3": (
        {**GEMMA, **LOCAL, "qk_norm": True, "full_attention_every": 3, "rope_base": 1e6, "window_rope_base": 1e4},
        "Gemma3ForCausalLM",
    ),
}
KINDS = {
    "T5 1.0": (T5_TIED, "T5ForConditionalGeneration"),
    "T5 1.1": (T5, "T5ForConditionalGeneration"),
    "BART": (BART, "BartForConditionalGeneration"),
    "BART, scaled": ({**BART, "scale_embedding": True, "activation": "relu"}, "BartForConditionalGeneration"),
    "T5Gemma": ({**STACKS_OF_TODAY["t5gemma"], "bos_id": 2}, "T5GemmaForConditionalGeneration"),
    "T5Gemma, unbalanced": ({**STACKS_OF_TODAY["t5gemma, unbalanced"], "bos_id": 2}, "T5GemmaForConditionalGeneration"),
    "T5Gemma 2": ({**STACKS_OF_TODAY["t5gemma2"], "bos_id": 2}, "T5Gemma2ForConditionalGeneration"),
    **ROTARY_DECODERS,
}


def config(kind, **changes):
    return parse({"vocab_size": 500, **KINDS[kind][0], **changes})


def ids(*shape, seed=0):
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


def batch_for(model, length):
    """Three rows, two with padding: (what transformers is given, our logits, labels of our losses, real positions)."""
    mask = (torch.arange(length) < torch.tensor([length, length * 2 // 3, 9])[:, None]).long()
    inputs = ids(3, length).masked_fill(mask == 0, model.config.pad_id)
    if not isinstance(model, EncoderDecoder):
        labels = inputs.masked_fill(mask == 0, IGNORE_INDEX)
        shifted = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORE_INDEX)], dim=1)
        given = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
        return given, lambda: model.decode(inputs, attention_mask=mask), shifted, mask.bool()
    real = torch.arange(length - 10) < torch.tensor([length - 13, length - 10, 3])[:, None]
    labels = ids(3, length - 10, seed=1).masked_fill(~real, IGNORE_INDEX)
    read = shift_right(labels, model.config.decoder_start_id, pad_id=model.config.pad_id)
    given = {"input_ids": inputs, "attention_mask": mask, "decoder_input_ids": read, "labels": labels}
    return given, lambda: model.decode(read, model.encode(inputs, mask), mask), labels, real


@each("kind", KINDS)
def test_logits_losses_and_gradients_are_those_of_transformers(kind, device, tmp_path):
    """Rows of T5 and BART are longer than the distances that T5 distinguishes."""
    model = randomise(build(config(kind)))
    if kind == "T5 1.0":  # a tied matrix has unit variance, and logits are divided by √d_model
        model.embedding.weight.data *= 1 / 0.15
    reference = in_transformers(model, tmp_path)
    assert type(reference).__name__ == KINDS[kind][1]
    model = placed(model, device)
    given, logits, labels, real = batch_for(model, 150 if kind.startswith(("T5 ", "BART")) else 30)
    expected, found = reference(**given), logits()
    assert expected.logits.std() > 0.5  # the comparison is not one of zeros
    assert (found - expected.logits)[real].abs().max() < 1e-5
    losses = model(given["input_ids"], labels, encoder_attention_mask=given["attention_mask"])["labels"]
    loss = losses.sum() / (labels != IGNORE_INDEX).sum()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    model.zero_grad()
    reference.zero_grad()
    loss.backward()
    expected.loss.backward()
    assert_gradients_agree(model, reference)


@each("d_kv, base", [(64, 1e4), (128, 5e5), (256, 1e6)])
def test_rotations_are_those_of_transformers_to_the_bit(d_kv, base):
    settings = {"head_dim": d_kv, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**settings))
    positions = torch.arange(0, 20_000, 7)
    expected = rotary(torch.zeros(1), positions[None])
    assert all(
        torch.equal(ours, theirs[0])
        for ours, theirs in zip(rotary_embedding(positions, d_kv, torch.float32, base), expected, strict=True)
    )


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
    ],
)
def test_what_no_model_of_transformers_can_be_is_not_exported(kind, changes, expected):
    with pytest.raises(UserError, match=expected):
        hf_model_of(config(kind, **changes))


@each(
    "class_name, changes, expected",
    [
        (
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
            "rope_type is 'linear'",
        ),
        ("LlamaConfig", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("LlamaConfig", {"mlp_bias": True}, "attention_bias and mlp_bias differ"),
        ("Qwen3Config", {"use_sliding_window": True, "max_window_layers": 2}, "layer_types: our models have"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, but"),
    ],
)
def test_what_our_model_cannot_be_is_refused(class_name, changes, expected, tmp_path):
    sizes = {"vocab_size": 500, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "eos_token_id": 1}
    settings = getattr(transformers, class_name)(**sizes, **heads, **changes)
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=expected):
        load_state(tmp_path)


@torch.no_grad()
def test_inputs_beyond_4096_tokens_are_those_of_transformers(tmp_path):
    sizes = {"num_layers": 2, "full_attention_every": 2, "sliding_window": 1024, "num_heads": 2, "d_model": 16}
    model = randomise(build(config("T5Gemma 2", **sizes)), std=0.1)
    reference = in_transformers(model, tmp_path)
    inputs, targets = ids(1, 4300), ids(1, 40, seed=1)
    expected = reference(input_ids=inputs, decoder_input_ids=targets).logits
    assert (model.decode(targets, model.encode(inputs)) - expected).abs().max() < 1e-5


def test_what_a_t5gemma_cannot_be_there_or_here_is_refused(tmp_path):
    for kind in ("T5Gemma", "T5Gemma 2"):
        with pytest.raises(UserError, match=r"can't generate with sliding_window: 1: its cache"):
            in_transformers(build(config(kind, sliding_window=1)), tmp_path)
    for marks, expected in (
        (
            {"bos_id": None},
            "padding, id 0, is also the decoder's start: train with model.pad_vocab_to_multiple_of: 128",
        ),
        ({"bos_id": 5, "eos_id": 5, "pad_id": 5}, "padding, id 5, is also the decoder's start and EOS: train"),
    ):
        with pytest.raises(UserError, match=expected):
            in_transformers(build(config("T5Gemma", **marks)), tmp_path)
    reference = in_transformers(build(config("T5Gemma")), tmp_path)
    for stack, change, expected in (
        ("encoder", {"sliding_window": 7}, "sliding_window is 7 in the encoder and 5 in the decoder"),
        ("decoder", {"layer_types": ["full_attention"] * 4}, "windows in different layers"),
    ):
        settings = reference.config.to_dict()
        settings[stack].update(change)
        type(reference.config).from_dict(settings).save_pretrained(tmp_path)
        with pytest.raises(UserError, match=expected):
            load_state(tmp_path)
