"""Every setting of a Hugging Face config is supported at import or refused by name."""

import json

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import load_state
from pretrain.models import build
from pretrain.models.model import shift_right
from tests.slow import slow
from tests.tables import each

transformers = pytest.importorskip("transformers")

LENGTH = 40
TWO_STACKS = {"vocab_size": 96, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 64}
TWO_STACKS |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
# A class of transformers and a small config of it; settings beside those that the config's class declares.
FAMILIES = {
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1}
        | {"num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
        | {"decoder_start_token_id": 0},
        {"decoder_start_token_id": 0, "tie_word_embeddings": True, "scale_decoder_outputs": True}
        | {"dense_act_fn": "relu", "is_gated_act": False},
    ),
    "bart": ("BartForConditionalGeneration", TWO_STACKS, {}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 96, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
        | {"bos_token_id": 95, "eos_token_id": 95},
        {"hidden_size": 16, "num_attention_heads": 2},
    ),
    "bert": (
        "BertForMaskedLM",
        {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "max_position_embeddings": 64},
        {"chunk_size_feed_forward": 0},
    ),
}


# Settings that appear in two places.
DERIVED = {"dense_act_fn": "feed_forward_proj", "is_gated_act": "feed_forward_proj"}
# Settings that transformers, or our model, needs in addition to a changed one.
NEEDS = {
    ("t5", "pad_token_id"): {"decoder_start_token_id": 4},
    ("bart", "eos_token_id"): {"decoder_start_token_id": 4},
    ("bert", "add_cross_attention"): {"is_decoder": True},
}


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"relu": "gelu", "gelu": "relu"}.get(value, "relu")
    return value + 0.25 if isinstance(value, float) else 2 * value or 4


def settings():
    for family, (_, sizes, beside) in FAMILIES.items():
        cases = []
        config = transformers.CONFIG_MAPPING[family]
        declared = {key: getattr(config(**sizes), key) for key in config.__annotations__ if key != "model_type"}
        for key, value in (declared | beside).items():
            if isinstance(value, bool | int | float | str):
                cases.append((family, key, another(value)))
        cases.append((family, "quantization_config", {"quant_method": "fp8"}))
        cases.append((family, "transformers_weights", "model.ema.safetensors"))
        yield from cases if family == "t5" else slow(*cases)


@each("family, key, value", settings())
def test_a_setting_is_followed_or_refused_by_name(family, key, value, tmp_path):
    """Compares transformers' model, with random weights that fit the setting, with ours from the same files."""
    name, sizes, _ = FAMILIES[family]
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    beside = key in ("quantization_config", "transformers_weights")
    changes = {} if beside else {key: value, **NEEDS.get((family, key), {})}
    torch.manual_seed(0)
    reference = getattr(transformers, name)(transformers.CONFIG_MAPPING[family](**{**sizes, **changes})).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    reference.save_pretrained(tmp_path)
    if beside:
        saved = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**saved, key: value}))
    try:
        ours, state = load_state(tmp_path)
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert f"{DERIVED.get(key, key)} is " in refusal
        return
    model = build(ours).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        if family in ("t5", "bart"):
            expected = reference(input_ids=ids, labels=ids).logits
            found = model.decode(shift_right(ids, ours.decoder_start_id), model.encode(ids))
        elif family == "gpt2":
            expected, found = reference(input_ids=ids).logits, model.decode(ids)
        else:
            expected, found = reference(input_ids=ids).logits, model.masked_lm_logits(model.encode(ids))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
