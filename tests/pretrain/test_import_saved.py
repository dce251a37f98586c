"""Imports of directories that transformers wrote from a model of its own, for every kind of model that it knows."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrain.huggingface import load_state
from pretrain.models import FAMILIES, build
from pretrain.models.model import shift_right
from pretrain.models.state_dict_adapter import hf_models
from tests.pretrain.exported import randomise
from tests.tables import each

transformers = pytest.importorskip("transformers")

IDS = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**IDS, **WIDTHS, "num_key_value_heads": 2, "head_dim": 6}
GEMMA = {**GROUPED, "query_pre_attn_scalar": 5, "sliding_window": 4}
BERT = {**IDS, **WIDTHS, "max_position_embeddings": 40}
IMAGES = {"model_type": "siglip_vision_model", **WIDTHS, "image_size": 14, "patch_size": 14}
T5 = {**IDS, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
HALF = {"ffn_dim": 24, "attention_heads": 4}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 40}
BART |= {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in HALF.items()}
GPT2 = {**IDS, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5GEMMA2 = {"text_config": GEMMA, "vision_config": IMAGES, "mm_tokens_per_image": 1}
# The class, its settings, and whether it can be saved without its head: the head is then the embedding.
KINDS = {
    "T5 v1.0": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, False),
    "T5 v1.1": (
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        False,
    ),
    "BART": ("BartForConditionalGeneration", {**IDS, **BART, "decoder_start_token_id": 1}, True),
    "GPT-2": ("GPT2LMHeadModel", GPT2, True),
    "Llama": ("LlamaForCausalLM", GROUPED, False),
    "Llama, tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}, True),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED, False),
    "Gemma 2": ("Gemma2ForCausalLM", GEMMA, True),
    "Gemma 3": ("Gemma3ForCausalLM", GEMMA, True),
    "T5Gemma": ("T5GemmaForConditionalGeneration", {"vocab_size": 96, "encoder": GEMMA, "decoder": GEMMA}, True),
    "T5Gemma 2": ("T5Gemma2ForConditionalGeneration", {"encoder": T5GEMMA2, "decoder": GEMMA}, True),
    "BERT": ("BertForMaskedLM", BERT, False),
    "BERT, next sentences": ("BertForPreTraining", BERT, False),
    "RoBERTa": ("RobertaForMaskedLM", BERT, False),
}


def theirs(kind):
    name, settings, _ = KINDS[kind]
    model = getattr(transformers, name)
    return randomise(model(model.config_class(**settings)))


def logits(config, state, reference):
    """(ours, theirs) for 30 inputs, which exceed the windows, and for 20 targets where there are any."""
    model = build(config).eval()
    model.load_state_dict(state)
    inputs, targets = torch.randint(3, 96, (2, 50), generator=torch.Generator().manual_seed(0)).split([30, 20], dim=1)
    with torch.no_grad():
        if config.family in ("decoder_only", "encoder_only"):
            found = reference(input_ids=inputs)
            expected = found.prediction_logits if "prediction_logits" in found else found.logits
            if config.family == "decoder_only":
                return model.decode(inputs), expected
            return model.masked_lm_logits(model.encode(inputs)), expected
        read = shift_right(targets, config.decoder_start_id)
        expected = reference(input_ids=inputs, decoder_input_ids=read).logits
        return model.decode(read, model.encode(inputs)), expected


def test_every_kind_of_model_is_among_these():
    """But for those whose class comes with our export: test_remote_code.py saves them again."""
    known = {one.model_type for family in FAMILIES for one in hf_models(family) if not one.code}
    tried = {getattr(transformers, name).config_class.model_type for name, _, _ in KINDS.values()}
    assert tried == known


@each("kind", KINDS)
def test_what_transformers_saved_computes_the_same(kind, tmp_path):
    """Also where it saved the model without its head."""
    reference = theirs(kind)
    reference.save_pretrained(tmp_path)
    config, state = load_state(tmp_path)
    found, expected = logits(config, state, reference)
    assert expected.std() > 0.01  # the comparison is not one of zeros
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if KINDS[kind][2]:
        reference.base_model.save_pretrained(tmp_path / "base")
        base_config, base = load_state(tmp_path / "base")
        assert base_config == config
        assert all(torch.equal(base[name], tensor) for name, tensor in state.items())


def renamed(*pairs):
    def change(tensors):
        for theirs, others in pairs:
            tensors = {re.sub(theirs, others, name): tensor for name, tensor in tensors.items()}
        return tensors

    return change


def with_mask(dtype):
    return lambda tensors: {**tensors, "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().to(dtype)}


@each(
    "kind, change",
    [
        ("T5 v1.0", renamed((r"^shared\.", "encoder.embed_tokens."))),
        ("T5 v1.0", renamed((r"^shared\.", "lm_head."))),
        *(("GPT-2", with_mask(dtype)) for dtype in (torch.bool, torch.uint8, torch.float32)),
        ("BERT", renamed((r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta"))),
        ("T5Gemma 2", renamed((r"^(model\.encoder\.)(?=embed_tokens|layers|norm)", r"\1text_model."))),
    ],
)
def test_the_names_of_other_files_are_known(kind, change, tmp_path):
    """OpenAI's files of GPT-2 have masks beside the weights; T5Gemma 2 has one name in files, another in memory."""
    theirs(kind).save_pretrained(tmp_path)
    expected, file = load_state(tmp_path)[1], tmp_path / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors)
    assert changed.keys() != tensors.keys()
    save_file(changed, file, metadata={"format": "pt"})
    _, found = load_state(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
