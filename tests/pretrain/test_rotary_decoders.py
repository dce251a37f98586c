"""Decoders with the layers of Llama, Qwen3, Gemma 2 and Gemma 3, compared with transformers' in both directions."""

import itertools

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import hf_model_of, load_state
from pretrain.models import DecoderOnlyConfig, build
from pretrain.models.positions import rotary_embedding
from tests.pretrain.exported import assert_gradients_agree, in_transformers, randomise
from tests.tables import each

transformers = pytest.importorskip("transformers")

SIZES = {"d_model": 48, "d_ff": 96, "num_heads": 4, "num_layers": 4, "positions": "rotary", "biases": False}
GROUPED = {**SIZES, "num_key_value_heads": 2, "norm": "rms", "activation": "swiglu", "layer_norm_epsilon": 1e-6}
GEMMA = {**GROUPED, "norm": "rms_around_one", "activation": "geglu", "norm_after": True, "scale_embedding": True}
LOCAL = {"sliding_window": 5, "full_attention_every": 2, "head_dim": 16}
# the settings of each model's layers, and its class in transformers
KINDS = {
    "Llama": ({**GROUPED, "rope_base": 500_000.0, "tie_embeddings": False}, "LlamaForCausalLM"),
    "Llama, biases": ({**GROUPED, "biases": True, "num_key_value_heads": None}, "LlamaForCausalLM"),
    "Qwen3": ({**GROUPED, "qk_norm": True, "head_dim": 16, "rope_base": 1e6}, "Qwen3ForCausalLM"),
    "Qwen3, windows": ({**GROUPED, **LOCAL, "qk_norm": True, "full_attention_every": 3}, "Qwen3ForCausalLM"),
    "Gemma 2": (
        {**GEMMA, **LOCAL, "query_pre_attn_scalar": 24, "attention_softcap": 5.0, "output_softcap": 3.0},
        "Gemma2ForCausalLM",
    ),
    "Gemma 3": (
        {**GEMMA, **LOCAL, "qk_norm": True, "full_attention_every": 3, "rope_base": 1e6, "window_rope_base": 1e4},
        "Gemma3ForCausalLM",
    ),
}


def config(kind, **changes):
    return DecoderOnlyConfig(**{"vocab_size": 500, "pad_id": 0, "eos_id": 1, **KINDS[kind][0], **changes})


def padded_rows():
    """(ids, mask): rows of 30, 22 and 9 tokens."""
    mask = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()
    return ids(3, 30), mask


def ids(*shape, seed=0):
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


@each("kind, dtype", itertools.product(KINDS, [torch.float32, torch.float64]))
def test_logits_losses_and_gradients_are_those_of_transformers(kind, dtype, tmp_path):
    """In fp64 too, transformers computes norms, rotations and softmax in fp32.

    The rows of fp64 have no padding: there transformers' masks become minus infinity in its softmax, and what sees
    padding alone becomes NaN.
    """
    model = randomise(build(config(kind)))
    reference = in_transformers(model, tmp_path).to(dtype)
    assert type(reference).__name__ == KINDS[kind][1]
    model = model.to(dtype)
    inputs, mask = padded_rows()
    if dtype == torch.float64:
        mask = torch.ones_like(mask)
    labels = inputs.masked_fill(mask == 0, -100)
    model.zero_grad()
    reference.zero_grad()
    expected = reference(input_ids=inputs, attention_mask=mask, labels=labels)
    found = model.decode(inputs, attention_mask=mask)
    assert expected.logits.std() > 0.5  # the comparison is not one of zeros
    assert (found - expected.logits)[mask.bool()].abs().max() < 1e-5 * expected.logits.abs().max()
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    loss = model(inputs, shifted, encoder_attention_mask=mask)["labels"].sum() / (shifted != -100).sum()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
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
