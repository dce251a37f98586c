"""Models that transformers doesn't have, and long rows and rotations in those that it has.

test_exports.py compares logits, losses and gradients.
"""

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import hf_model_of
from pretrain.models import build, parse
from pretrain.models.positions import rotary_embedding
from tests.pretrain.exported import in_transformers, randomise
from tests.pretrain.small_models import STACKS_OF_TODAY, ids
from tests.pretrain.test_exports import CASES
from tests.tables import each

transformers = pytest.importorskip("transformers")

SIZES = {"family": "decoder_only", "pad_id": 0, "eos_id": 1, "d_model": 48, "d_ff": 96, "num_layers": 4, "mup": None}
ROTARY_DECODERS = {
    name: {**CASES[name][1], **SIZES}
    for name in ("Llama", "Llama, biases", "Qwen3", "Qwen3, windows", "Gemma 2", "Gemma 3")
}
for name in ("Qwen3, windows", "Gemma 3"):
    ROTARY_DECODERS[name]["full_attention_every"] = 3
KINDS = {
    "GPT-2": {**CASES["GPT-2"][1], **SIZES},
    "T5Gemma": {**STACKS_OF_TODAY["t5gemma"], "bos_id": 2},
    "T5Gemma 2": {**STACKS_OF_TODAY["t5gemma2"], "bos_id": 2},
    **ROTARY_DECODERS,
}


def config(kind, **changes):
    return parse({"vocab_size": 500, **KINDS[kind], **changes})


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
        ("GPT-2", {"positions": "rotary", "max_positions": None}, "no GPT-2 with positions: rotary"),
        ("GPT-2", {"subtract_positions": "without_norm"}, "no GPT-2 with subtract_positions: without_norm"),
    ],
)
def test_what_no_model_of_transformers_can_be_is_not_exported(kind, changes, expected):
    with pytest.raises(UserError, match=expected):
        hf_model_of(config(kind, **changes))


@torch.no_grad()
def test_inputs_beyond_4096_tokens_are_those_of_transformers(tmp_path):
    sizes = {"num_layers": 2, "full_attention_every": 2, "sliding_window": 1024, "num_heads": 2, "d_model": 16}
    model = randomise(build(config("T5Gemma 2", **sizes)), std=0.1)
    reference = in_transformers(model, tmp_path)
    inputs, targets = ids(1, 4300), ids(1, 40, seed=1)
    expected = reference(input_ids=inputs, decoder_input_ids=targets).logits
    assert (model.decode(targets, model.encode(inputs)) - expected).abs().max() < 1e-5


def test_what_a_t5gemma_cannot_be_there_is_refused(tmp_path):
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
