"""Directories that transformers wrote, changed so that they can't be imported: one line says why."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import import_, load_state
from tests.in_process import run_here
from tests.pretrain.test_import_saved import GEMMA, T5GEMMA2, theirs

transformers = pytest.importorskip("transformers")

LARGEST, LAYERS = "but the largest dimension of the weights is 96", "but there are weights of 2 layers"
WIDE, DEEP = 2**40, 10**7


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a model of a kind once: (config.json, tensors)."""
    found = {}

    def of(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp("saved")
            theirs(kind).save_pretrained(folder)
            found[kind] = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        return found[kind]

    return of


def written(saved, kind, folder, settings=None, tensors=None):
    """Writes the model of this kind with some settings, by their paths, and tensors changed."""
    config, weights = saved(kind)
    config = json.loads(json.dumps(config))
    for path, value in (settings or {}).items():
        section = config
        *above, key = path.split(".")
        for name in above:
            section = section[name]
        section[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**weights, **(tensors or {})}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "key", "value", "why"),
    [
        ("T5 v1.1", "num_layers", DEEP, "but there are weights of 3 layers"),
        ("T5 v1.1", "num_hidden_layers", DEEP, "but there are weights of 3 layers"),  # another name of it
        ("BART", "decoder_layers", DEEP, "but there are weights of 3 layers"),
        ("GPT-2", "n_layer", DEEP, LAYERS),
        ("RoBERTa", "num_hidden_layers", DEEP, LAYERS),
        ("T5Gemma", "encoder.num_hidden_layers", DEEP, LAYERS),
        ("T5Gemma 2", "decoder.num_hidden_layers", DEEP, LAYERS),
        ("BART", "encoder_ffn_dim", WIDE, LARGEST),
        ("GPT-2", "n_embd", WIDE, LARGEST),
        ("Llama", "num_key_value_heads", WIDE, LARGEST),
        ("Qwen3", "head_dim", WIDE, LARGEST),
        ("Gemma 3", "vocab_size", WIDE, LARGEST),
        ("T5Gemma", "decoder.hidden_size", WIDE, LARGEST),
        ("T5Gemma 2", "encoder.text_config.hidden_size", 1e300, LARGEST),
    ],
)
def test_a_size_that_the_weights_do_not_have_is_refused_before_a_model_is_built(
    kind, key, value, why, saved, tmp_path, monkeypatch
):
    folder = written(saved, kind, tmp_path, {key: value})

    def built(*_):
        raise AssertionError("a model is built")

    monkeypatch.setattr(torch.nn.Module, "__init__", built)
    with pytest.raises(UserError) as refused:
        load_state(folder)
    named = "num_layers" if (kind, key) == ("T5 v1.1", "num_hidden_layers") else key
    assert str(refused.value) == f"{folder}/config.json: {named} is {value}, {why}"
    assert refused.value.exit_code == 2


def test_the_tower_for_images_is_not_built(saved, tmp_path):
    _, expected = load_state(written(saved, "T5Gemma 2", tmp_path))
    changes = {"encoder.vision_config.num_hidden_layers": 10**9, "encoder.vision_config.hidden_size": WIDE}
    _, found = load_state(written(saved, "T5Gemma 2", tmp_path, changes))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("kind", "name"), [("Llama", "lm_head.weight"), ("T5 v1.1", "shared.weight")])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensor: tensor.to(torch.float8_e4m3fn), "{} is of F8_E4M3, expected F64, F32, F16, BF16: quantized"),
        (lambda tensor: tensor.to(torch.float8_e5m2), "{} is of F8_E5M2, expected F64, F32, F16, BF16: quantized"),
        (lambda tensor: tensor.double() * 1e300, "numbers beyond the range of fp32 in {}"),
    ],
)
def test_numbers_that_fp32_does_not_have_are_refused(kind, name, change, why, saved, tmp_path):
    folder = written(saved, kind, tmp_path, tensors={name: change(saved(kind)[1][name])})
    with pytest.raises(UserError) as refused:
        load_state(folder)
    assert str(refused.value).startswith(f"{folder}/model.safetensors: {why.format(name)}")
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_fp64_within_the_range_of_fp32_is_rounded(saved, tmp_path):
    name = "lm_head.weight"
    exact = saved("Llama")[1][name].double() + 1e-12
    _, state = load_state(written(saved, "Llama", tmp_path, tensors={name: exact}))
    assert torch.equal(state[name], exact.float())


@pytest.mark.parametrize(("kind", "own"), [("Llama", False), ("Qwen3", False), ("Gemma 2", True), ("Gemma 3", True)])
def test_a_setting_that_transformers_ignores_is_ignored(kind, own, saved, tmp_path):
    """Llama's and Qwen3's attention is always divided by the square root of a head's width."""
    config, _ = load_state(written(saved, kind, tmp_path, {"query_pre_attn_scalar": 999}))
    assert config.query_pre_attn_scalar == (999 if own else None)
    assert config.attention_scalar == (999 if own else 6)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("Llama", {"eos_token_id": 10**6}, "eos_token_id is 1000000, but the embedding has 96 rows"),
        ("T5 v1.1", {"eos_token_id": 96}, "eos_token_id is 96, but the embedding has 96 rows"),
        ("GPT-2", {"pad_token_id": 96}, "pad_token_id is 96, but the embedding has 96 rows"),
        ("T5Gemma", {"decoder.bos_token_id": 500}, "bos_token_id is 500, but the embedding has 96 rows"),
        ("Llama", {"eos_token_id": [1, 500, 600]}, "eos_token_id has [500, 600], but the embedding has 96 rows"),
        ("Llama", {"eos_token_id": None}, "eos_token_id: input should be a valid integer, got None"),
        ("GPT-2", {"eos_token_id": -3}, "eos_token_id: input should be greater than or equal to 0, got -3"),
        ("BART", {"dropout": 1.5}, "dropout: input should be less than 1, got 1.5"),
        ("GPT-2", {"resid_pdrop": 1.5}, "resid_pdrop: input should be less than 1, got 1.5"),
        ("Qwen3", {"num_key_value_heads": 3}, "num_key_value_heads: 3 doesn't divide num_attention_heads 4"),
        (
            "T5Gemma",
            {"encoder.num_key_value_heads": 3},
            "encoder: num_key_value_heads: 3 doesn't divide num_attention_heads 4",
        ),
    ],
)
def test_a_message_names_the_key_of_the_file(kind, settings, why, saved, tmp_path):
    folder = written(saved, kind, tmp_path, settings)
    with pytest.raises(UserError) as refused:
        load_state(folder)
    assert str(refused.value) == f"{folder}/config.json: {why}"


def test_an_end_of_image_that_text_can_have_is_refused(spiece, tmp_path):
    """transformers embeds it by a vector of its own. 300 pieces, and then a special token that no text becomes."""
    tokenizer = transformers.T5Tokenizer.from_pretrained(spiece.parent, extra_ids=0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_image>"]})
    tokenizer.save_pretrained(tmp_path)
    stack = {**GEMMA, "vocab_size": 320}
    for id_, is_text in ((50, True), (1, True), (300, False), (310, False)):
        config = transformers.T5Gemma2Config(
            encoder={**T5GEMMA2, "text_config": stack, "eoi_token_index": id_}, decoder=stack
        )
        transformers.T5Gemma2ForConditionalGeneration(config).save_pretrained(tmp_path)
        if is_text:
            with pytest.raises(UserError, match=rf"encoder\.eoi_token_index is {id_} in config\.json") as refused:
                import_(tmp_path, tmp_path / "out")
            assert "\n" not in str(refused.value)
        else:
            import_(tmp_path, tmp_path / f"out-{id_}")


def test_an_output_where_no_directory_can_be_made_is_one_line(spiece, tmp_path):
    transformers.T5Tokenizer.from_pretrained(spiece.parent, extra_ids=0).save_pretrained(tmp_path)
    sizes = {"vocab_size": 320, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    model.save_pretrained(tmp_path)
    done = run_here("pretrain", "import", tmp_path, "/proc/out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: /proc/out: no directory can be made here: no such file or directory\n"
