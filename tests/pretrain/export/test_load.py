"""Imports of directories that transformers wrote from a model of its own, for every kind of model and tokenizer."""

import functools
import json
import re
import shutil

import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2 as protocol

from data_pipeline.base import config_file
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.tokenizer import Tokenizer, load, save, tokenizer_json
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.decoding import generate
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.export import export, hf_model_of, import_, load_state, to_hf, tokenizer_files
from pretrain.models import FAMILIES, build
from pretrain.models.model import shift_right
from pretrain.models.rotary_hf import GLOBAL, LOCAL
from pretrain.models.stacks import EncoderDecoder
from pretrain.models.state_dict_adapter import hf_models
from tests.conftest import TOP, write_corpus_file
from tests.support.exported import in_transformers, randomise
from tests.support.in_process import done_here, refused_here
from tests.support.slow import slow
from tests.support.small_models import as_at_the_start, logits_of
from tests.support.tables import each

transformers = pytest.importorskip("transformers")

TEXTS = [
    *(TOP / "LICENSE").read_text(encoding="utf-8").splitlines(),
    'You may add Your own "copyright" statement;  two  spaces\tand a tab.',
    "Naïve façades of Ångström: ½ of the ﬁnal ＷＩＤＥ text, 日本語 too.",
    " \n ",
]
IDS = {"vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**IDS, **WIDTHS, "num_key_value_heads": 2, "head_dim": 6}
GEMMA = {**GROUPED, "query_pre_attn_scalar": 5, "sliding_window": 4}
BERT = {**IDS, **WIDTHS, "max_position_embeddings": 40}
IMAGES = {"model_type": "siglip_vision_model", **WIDTHS, "image_size": 14, "patch_size": 14}
T5 = {**IDS, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
V1_1 = {**T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
HALF = {"ffn_dim": 24, "attention_heads": 4}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 40}
BART |= {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in HALF.items()}
GPT2 = {**IDS, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5GEMMA2 = {"text_config": GEMMA, "vision_config": IMAGES, "mm_tokens_per_image": 1}
# The class, its settings, and whether it can be saved without its head: the head is then the embedding.
KINDS = {
    "T5 v1.0": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, False),
    "T5 v1.1": ("T5ForConditionalGeneration", V1_1, False),
    "UL2": ("T5ForConditionalGeneration", {**V1_1, "feed_forward_proj": "gated-silu"}, False),
    "mT5": ("MT5ForConditionalGeneration", V1_1, False),
    "umT5": ("UMT5ForConditionalGeneration", V1_1, False),
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


def model_of(kind, std=0.15, **changes):
    name, settings, _ = KINDS[kind]
    model = getattr(transformers, name)
    return randomise(model(model.config_class(**{**settings, **changes})), std)


def logits(config, state, reference):
    """(ours, theirs) for 32 inputs, which exceed the windows, and for 20 targets where there are any."""
    model = build(config).eval()
    model.load_state_dict(state)
    inputs, targets = torch.randint(3, 96, (2, 52), generator=torch.Generator().manual_seed(0)).split([32, 20], dim=1)
    two = isinstance(model, EncoderDecoder)
    with torch.no_grad():
        read = {"decoder_input_ids": shift_right(targets, config.decoder_start_id)} if two else {}
        found = reference(input_ids=inputs, **read)
        expected = found.prediction_logits if "prediction_logits" in found else found.logits
        return logits_of(model, inputs, targets), expected


def test_every_kind_of_model_is_among_these():
    """But for those whose class comes with our export: test_exports.py saves them again."""
    known = {one.model_type for family in FAMILIES for one in hf_models(family) if not one.code}
    tried = {getattr(transformers, name).config_class.model_type for name, _, _ in KINDS.values()}
    assert tried == known


@each("kind", KINDS)
def test_what_transformers_saved_computes_the_same(kind, tmp_path):
    """Also where it saved the model without its head."""
    reference = model_of(kind)
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


@each("kind", ["T5 v1.0", "T5 v1.1", "UL2", "mT5", "umT5", "BART"])
def test_what_transformers_saved_generates_the_same(kind, tmp_path):
    """ByT5 and Flan-T5 are T5s v1.1. Random weights repeat themselves, unless that is forbidden."""
    reference = model_of(kind, 0.3)
    reference.save_pretrained(tmp_path)
    config, state = load_state(tmp_path)
    model = build(config).eval()
    model.load_state_dict(state)
    inputs = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "no_repeat_ngram_size": 1}
    ours = generate(model, inputs, torch.ones_like(inputs), GenerationSettings(**settings))
    others = {"do_sample": False, "num_beams": 1, "forced_eos_token_id": None}
    # transformers 5 sizes the cache of a decoder by the number of the encoder's layers
    theirs = reference.generate(inputs, use_cache=False, **others, **settings)
    assert theirs[:, 1:].tolist() == ours.tolist()
    assert len(ours.unique()) > 16


def build_with(config, state):
    model = build(config).eval()
    model.load_state_dict(state)
    return model


def old_umt5(folder):
    """A umT5 whose config.json doesn't tie the matrices: its outputs aren't scaled."""
    reference = model_of("umT5")
    reference.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "tie_word_embeddings": False}))
    return reference


def test_outputs_of_a_umt5_are_scaled_as_its_file_says(tmp_path):
    """transformers 4 followed the file. transformers 5 scales those of all: an export has the inverse in its norm."""
    reference = old_umt5(tmp_path)
    config, state = load_state(tmp_path)
    found, scaled = logits(config, state, reference)
    assert not config.scale_outputs
    torch.testing.assert_close(found, scaled * 16**0.5, rtol=1e-4, atol=1e-5)
    exported = in_transformers(build_with(config, state), tmp_path / "out")
    found, expected = logits(config, state, exported)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each(
    "version, tied, scaled",
    [("4.57.6", True, True), ("4.57.6", False, False), ("4.9.0", None, False), ("5.23.0", True, False)],
)
def test_outputs_of_an_mt5_are_scaled_if_transformers_4_did_so(version, tied, scaled, tmp_path):
    model_of("mT5").save_pretrained(tmp_path)
    saved = {**json.loads((tmp_path / "config.json").read_text()), "transformers_version": version}
    del saved["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(saved | ({} if tied is None else {"tie_word_embeddings": tied})))
    config, _ = load_state(tmp_path)
    assert config.scale_outputs == scaled


@each(
    "name, lacking",
    [
        ("SwitchTransformers", "t5 has no layers of experts, between which a router chooses"),
        ("LongT5", "t5 has no local and transient-global attention, which LongT5's encoder has"),
        ("MBart", "bart has no norms before its layers"),
        ("M2M100", "bart has no norms before its layers and no sinusoidal positions"),
        ("Pegasus", "bart has no norms before its layers and no sinusoidal positions"),
        ("Marian", "bart has no sinusoidal positions"),
    ],
)
def test_relatives_that_are_not_built_are_refused_by_what_our_family_lacks(name, lacking, tmp_path):
    theirs = getattr(transformers, f"{name}Config")()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        load_state(tmp_path)
    assert str(refused.value) == f"{tmp_path}/config.json: model_type is {theirs.model_type!r}: our {lacking}"


def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(tmp_path):
    name = tmp_path / "google/flan-t5-base"
    line = refused_here(2, "pretrain", "import", name, tmp_path / "out")
    assert line == f"error: {name}/config.json: no such file; from the Hub: hf download NAME --local-dir DIR"
    with pytest.raises(UserError, match=r"config\.json: no such file$"):
        load_state(tmp_path)


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
        ("BART", lambda tensors: {**tensors, "model.encoder.version": torch.Tensor([3])}),
        ("BERT", renamed((r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta"))),
        ("T5Gemma 2", renamed((r"^(model\.encoder\.)(?=embed_tokens|layers|norm)", r"\1text_model."))),
    ],
)
def test_the_names_of_other_files_are_known(kind, change, tmp_path):
    """OpenAI's files of GPT-2 have masks beside the weights; T5Gemma 2 has one name in files, another in memory."""
    model_of(kind).save_pretrained(tmp_path)
    expected, file = load_state(tmp_path)[1], tmp_path / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors)
    assert changed.keys() != tensors.keys()
    save_file(changed, file, metadata={"format": "pt"})
    _, found = load_state(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# Every setting of a config is followed, or refused by its name


# Settings beside those that the config's class declares.
BESIDE = {
    "T5 v1.0": {"decoder_start_token_id": 0, "tie_word_embeddings": True, "scale_decoder_outputs": True}
    | {"dense_act_fn": "relu", "is_gated_act": False},
    "BART": {},
    "GPT-2": {"hidden_size": 16, "num_attention_heads": 4},
    "BERT": {"chunk_size_feed_forward": 0},
}
# Keys that no model is built from.
OF_FILES = {"quantization_config": {"quant_method": "fp8"}, "transformers_weights": "model.ema.safetensors"}
# Settings that appear in two places.
DERIVED = {"dense_act_fn": "feed_forward_proj", "is_gated_act": "feed_forward_proj"}
# Settings that transformers, or our model, needs in addition to a changed one.
NEEDS = {
    ("T5 v1.0", "pad_token_id"): {"decoder_start_token_id": 4},
    ("BART", "eos_token_id"): {"decoder_start_token_id": 2},
    ("BERT", "add_cross_attention"): {"is_decoder": True},
}


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"relu": "gelu", "gelu": "relu"}.get(value, "relu")
    return value + 0.25 if isinstance(value, float) else 2 * value or 4


def every_setting():
    for kind, beside in BESIDE.items():
        config = getattr(transformers, KINDS[kind][0]).config_class
        example = config(**KINDS[kind][1])
        known = {key: getattr(example, key) for key in config.__annotations__ if key != "model_type"} | beside
        changed = {key: another(value) for key, value in known.items() if isinstance(value, bool | int | float | str)}
        cases = [(kind, key, value) for key, value in (changed | OF_FILES).items()]
        yield from cases if kind == "T5 v1.0" else slow(*cases)


@each("kind, key, value", every_setting())
def test_a_setting_is_followed_or_refused_by_name(kind, key, value, tmp_path):
    """Compares transformers' model, with random weights that fit the setting, with ours from the same files."""
    reference = model_of(kind, 0.5, **({} if key in OF_FILES else {key: value, **NEEDS.get((kind, key), {})}))
    reference.save_pretrained(tmp_path)
    if key in OF_FILES:
        saved = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**saved, key: value}))
    try:
        config, state = load_state(tmp_path)
    except UserError as refused:
        said = str(refused)
        assert f"{DERIVED.get(key, key)} is " in said
        return
    found, expected = logits(config, state, reference)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Changed so that they can't be imported: one line says why


LAYERS = "but there are weights of 2 layers"
HEADS = "3 doesn't divide num_attention_heads 4"
NOT_OURS = "our models don't support these settings"
DEPTHS = {LAYERS, "but there are weights of 3 layers"}
WIDE, DEEP, MANY = 2**40, 10**7, "100000000"
HEAD, SHARED, TWICE = "lm_head.weight", "shared.weight", "model.encoder.text_model.norm.weight"
OWN_CODE = ("modern", "vanilla", "double_decoder")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a model of a kind once: (config.json, tensors)."""

    @functools.cache
    def of(kind):
        if kind in OWN_CODE:
            model = as_at_the_start(kind)
            exported = to_hf(hf_model_of(model.config), model.config, model.state_dict())
            return exported.config, exported.tensors
        folder = tmp_path_factory.mktemp("saved")
        model_of(kind).save_pretrained(folder)
        return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    return of


def written(saved, kind, folder, settings=None, tensors=None):
    """Writes the model of this kind with some settings, by their paths, and tensors changed; `...`: left out."""
    config, weights = saved(kind)
    config = json.loads(json.dumps(config))
    for path, value in (settings or {}).items():
        *above, key = path.split(".")
        section = functools.reduce(dict.__getitem__, above, config)
        section[key] = value
        if value is ...:
            del section[key]
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in {**weights, **(tensors or {})}.items() if tensor is not ...}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


UNSCALED = {"rope_type": "default", "rope_theta": 1e6}
SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}


def test_an_export_of_an_earlier_version_without_rope_factor_is_read(saved, tmp_path):
    _, expected = load_state(written(saved, "modern", tmp_path))
    config, found = load_state(written(saved, "modern", tmp_path, {"rope_factor": ...}))
    assert config.rope_factor == 1.0
    assert found.keys() == expected.keys()


@each(
    "kind, key, value, why",
    [
        ("T5 v1.1", "num_layers", DEEP, "but there are weights of 3 layers"),
        ("T5 v1.1", "num_hidden_layers", DEEP, "but there are weights of 3 layers"),  # another name of it
        ("T5Gemma 2", "decoder.num_hidden_layers", DEEP, LAYERS),
        ("BART", "encoder_ffn_dim", WIDE, f"…encoder_ffn_dim is {WIDE} and decoder_ffn_dim is 24…"),
        ("Qwen3", "head_dim", WIDE, f"head_dim: input should be less than or equal to 1048576, got {WIDE}"),
        ("T5Gemma 2", "encoder.text_config.hidden_size", 1e300, "…Field 'hidden_size' expected int, got float…"),
        ("Llama", "eos_token_id", None, "eos_token_id: input should be a valid integer, got None"),
        ("GPT-2", "eos_token_id", -3, "eos_token_id: input should be greater than or equal to 0, got -3"),
        ("BART", "dropout", 1.5, "dropout: input should be less than 1, got 1.5"),
        ("Qwen3", "num_key_value_heads", 3, f"num_key_value_heads: {HEADS}"),
        ("T5 v1.1", "d_model", "x", "…d_model…"),
        ("BART", "model_type", "xlm", "model_type is 'xlm', not one of t5…"),
        ("BART", "decoder_attention_heads", 2, "…encoder_attention_heads is 4 and decoder_attention_heads is 2…"),
        ("BART", "encoder_layerdrop", 0.1, f"{NOT_OURS}: encoder_layerdrop is 0.1, but must be 0.0"),
        ("BART", "decoder_start_token_id", 0, "…but our bart starts from EOS, 1"),
        ("BART", "activation_function", "swish", "…activation_function is 'swish', not one of relu, gelu…"),
        ("RoBERTa", "hidden_act", "relu", "…hidden_act is 'relu', but the head of RoBERTa has gelu…"),
        ("RoBERTa", "num_attention_heads", 5, "num_attention_heads: 5 doesn't divide hidden_size 16…"),
        ("Llama", "mlp_bias", True, "…attention_bias and mlp_bias differ"),
        ("Llama", "rope_parameters", {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}, "…'dynamic'"),
        ("Gemma 3", "rope_parameters", {GLOBAL: UNSCALED, LOCAL: SCALED}, "…sliding_attention is scaled by itself"),
        ("Gemma 3", "layer_types", [GLOBAL, LOCAL], "…layer_types: our models have"),
        ("Gemma 3", "use_bidirectional_attention", True, "…use_bidirectional_attention is True, but"),
        ("T5Gemma", "encoder.sliding_window", 7, "…sliding_window is 7 in the encoder and 4 in the decoder"),
        ("T5Gemma", "decoder.layer_types", [GLOBAL, GLOBAL], "…windows in different layers"),
        ("T5 v1.1", "num_decoder_layers", MANY, "…Field 'num_decoder_layers' expected int, got str…"),
        ("T5 v1.1", "model_type", ["t5"], "…model_type is ['t5'], not one of t5, "),
        ("modern", "encoder.num_layers", MANY, "…encoder.num_layers: input should be less than or equal to 1024"),
        ("modern", "vocab_size", None, "…vocab_size is null"),
        ("modern", "norm", "batch", "norm: input should be 'layer', 'rms' or 'rms_around_one', got 'batch'"),
        ("modern", "max_positions", 40, "max_positions: rotary positions have no limit; leave it out"),
        ("modern", "encoder", 5, "…encoder: input should be "),
        ("modern", "biases", ..., "lacks 'biases'"),
        ("modern", "decoder_start_token_id", 7, "…token_id is 7, but our modern starts from padding, 0"),
        ("vanilla", "tie_word_embeddings", False, "…tie_word_embeddings is False, but must be True"),
        ("double_decoder", "block_length", 0, "block_length: input should be greater than 0, got 0"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_the_key_of_the_file(kind, key, value, why, saved, tmp_path, monkeypatch):
    """Layers that the weights don't have, before a model with so many is built."""
    folder = written(saved, kind, tmp_path, {key: value})

    def built(*_):
        raise AssertionError("a model is built")

    if why in DEPTHS:
        monkeypatch.setattr(torch.nn.Module, "__init__", built)
    with pytest.raises(UserError) as refused:
        load_state(folder)
    said = str(refused.value)
    if "…" in why:
        assert said.startswith(str(folder))
        assert why.strip("…") in said
        assert "\n" not in said
    else:
        named = "num_layers" if (kind, key) == ("T5 v1.1", "num_hidden_layers") else key
        assert said == f"{folder}/config.json: {f'{named} is {value}, {why}' if why in DEPTHS else why}"
    assert refused.value.exit_code == 2


def test_the_tower_for_images_takes_no_memory(saved, tmp_path):
    _, expected = load_state(written(saved, "T5Gemma 2", tmp_path))
    sizes = {f"encoder.vision_config.{key}": WIDE for key in ("num_hidden_layers", "hidden_size")}
    _, found = load_state(written(saved, "T5Gemma 2", tmp_path, sizes))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_names_with_control_characters_are_escaped(saved, tmp_path):
    written(saved, "T5 v1.1", tmp_path, tensors={"evil\n\x1b[31m": torch.zeros(2)})
    with pytest.raises(UserError, match=r"evil\\n\\x1b\[31m is not of the model$"):
        load_state(tmp_path)


FC1, FC2 = "model.encoder.layers.{}.fc1.bias", "model.decoder.layers.1.fc2.weight"
THREE_MISTAKES = {FC1.format(0): ..., FC1.format(7): torch.zeros(3), FC2: torch.zeros(5, 4)}
C_FC, C_FD = "transformer.h.1.mlp.c_fc.bias", "transformer.h.1.mlp.c_fd.bias"
F8 = torch.float8_e4m3fn


@each(
    "kind, change, why",
    [
        ("Llama", lambda t: {HEAD: t[HEAD].to(F8)}, r"lm_head\.weight is of F8_E4M3, expected .*, BF16: quantized"),
        ("Llama", lambda t: {HEAD: 1e300 * t[HEAD].double()}, r"infinite numbers or NaN in lm_head\.weight"),
        ("T5 v1.1", lambda t: {SHARED: t[SHARED].char()}, r"shared\.weight is of int8, not of floating-point numbers"),
        ("T5 v1.1", lambda t: {SHARED: t[SHARED] * torch.nan}, r"infinite numbers or NaN in shared\.weight"),
        ("T5Gemma 2", lambda _: {TWICE: torch.zeros(16)}, r"text_model\.embed_tokens\.weight is missing"),
        ("GPT-2", lambda t: {C_FC: ..., C_FD: t[C_FC]}, r"c_fc\.bias is missing; .*c_fd\.bias is not of the"),
        (
            "BART",
            lambda _: THREE_MISTAKES,
            r"0\.fc1\.bias is missing; .*7\.fc1\.bias .*fc2\.w.* \(16, 24\), is \(5, 4\)",
        ),
        ("BART", lambda t: {HEAD: t["model.shared.weight"] + 1}, r"lm_head\.weight differs from model\.shared\.weight"),
        ("vanilla", lambda t: {HEAD: t["embedding.weight"] + 1}, r"lm_head\.weight differs from embedding\.weight"),
    ],
)
def test_weights_that_are_not_of_the_model_are_refused_in_a_line(kind, change, why, saved, tmp_path):
    folder = written(saved, kind, tmp_path, tensors=change(saved(kind)[1]))
    with pytest.raises((UserError, FailedError), match=why) as refused:
        load_state(folder)
    assert str(refused.value).startswith(f"{folder}")
    assert "\n" not in str(refused.value)


def test_other_precisions_become_fp32(saved, tmp_path):
    exact = saved("Llama")[1][HEAD].double() + 1e-12
    for stored in (exact, exact.bfloat16(), exact.half()):
        _, state = load_state(written(saved, "Llama", tmp_path, tensors={HEAD: stored}))
        assert torch.equal(state[HEAD], stored.float())


@each("kind, own", [("Llama", False), ("Qwen3", False), ("Gemma 2", True), ("Gemma 3", True)])
def test_a_setting_that_transformers_ignores_is_ignored(kind, own, saved, tmp_path):
    """Llama's and Qwen3's attention is always divided by the square root of a head's width."""
    config, _ = load_state(written(saved, kind, tmp_path, {"query_pre_attn_scalar": 999}))
    assert config.query_pre_attn_scalar == (999 if own else None)
    assert config.attention_scalar == (999 if own else 6)


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
    model_of("T5 v1.0", vocab_size=320).save_pretrained(tmp_path)
    line = refused_here(2, "pretrain", "import", tmp_path, "/proc/out")
    assert line == "error: /proc/out: no directory can be made here: no such file or directory"


# Files of weights beside one another


PIECES = 300
INDEX = "model.safetensors.index.json"


def test_a_variant_beside_the_model_is_passed_over(tmp_path):
    model = model_of("T5 v1.0")
    model.save_pretrained(tmp_path)
    _, expected = load_state(tmp_path)
    with torch.no_grad():
        model.shared.weight.zero_()
    model.save_pretrained(tmp_path, variant="ema")  # model.ema.safetensors
    model.save_pretrained(tmp_path / "a", variant="z", max_shard_size="20KB")
    for path in (tmp_path / "a").glob("*.safetensors*"):
        path.rename(tmp_path / path.name)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    _, found = load_state(tmp_path)
    assert torch.equal(found["embedding.weight"], theirs.shared.weight)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"expected model\.safetensors, .*, or the index of .*, found model\.ema\.safet"
    ):
        load_state(tmp_path)


def test_shards_are_those_of_the_index(tmp_path):
    model_of("T5 v1.0").save_pretrained(tmp_path / "whole")
    _, expected = load_state(tmp_path / "whole")
    saved = tmp_path / "sharded"
    model_of("T5 v1.0").save_pretrained(saved, max_shard_size="20KB")
    shutil.copy(tmp_path / "whole/model.safetensors", saved / "model-00009-of-00009.safetensors")  # of an older save
    _, found = load_state(saved)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    index = json.loads((saved / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    for change, message in [
        ({"weight_map": {**index["weight_map"], name: "../whole/model.safetensors"}}, "leads out of the directory"),
        ({"weight_map": [name]}, "damaged: weight_map: Input should be"),
        ({}, "damaged: weight_map: Field required"),
    ]:
        (saved / INDEX).write_text(json.dumps(change))
        with pytest.raises(FailedError, match=message):
            load_state(saved)


def test_a_pickle_is_read_whole_or_in_shards_and_safetensors_come_first(tmp_path):
    model_of("T5 v1.0").save_pretrained(tmp_path)
    _, expected = load_state(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    tensors["encoder.embed_tokens.weight"] = tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"]
    names = sorted(tensors)
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for number, file in enumerate(files):
        torch.save({name: tensors[name] for name in names[number::2]}, tmp_path / file)
    weight_map = {name: files[number % 2] for number, name in enumerate(names)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, found = load_state(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.save({**tensors, "lm_head.weight": tensors["shared.weight"] + 1}, tmp_path / "pytorch_model.bin")
    _, found = load_state(tmp_path)
    assert torch.equal(found["lm_head.weight"], expected["embedding.weight"] + 1)
    save_file({name: tensors[name] for name in names if "embed_tokens" not in name}, tmp_path / "model.safetensors")
    _, found = load_state(tmp_path)
    assert torch.equal(found["lm_head.weight"], expected["embedding.weight"])


@each(
    "name, content, message",
    [
        ("generation_config.json", '{"decoder_start_token_id": 5}', "is 5, but our t5 starts from padding, 0"),
        ("adapter_config.json", "{}", "weights in an adapter can't be imported"),
        ("config.json", "{", "damaged: Invalid JSON"),
        ("config.json", "[]", "damaged: Input should be"),
        (
            "model.safetensors",
            None,
            r"expected model\.safetensors, pytorch_model\.bin or flax_.*, found tf_model\.h5\. ",
        ),
    ],
)
def test_what_needs_another_file_or_is_damaged_is_refused_in_a_line(name, content, message, tmp_path):
    model_of("T5 v1.0").save_pretrained(tmp_path)
    if content is None:
        (tmp_path / name).rename(tmp_path / "tf_model.h5")
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises((UserError, FailedError), match=message) as refused:
        load_state(tmp_path)
    assert content is None or str(refused.value).startswith(f"{tmp_path}/{name}: ")
    assert "\n" not in str(refused.value)


# Tokenizers


@each("sentinels", [0, 50, 100, 200])
def test_a_t5_that_transformers_saved_is_imported_with_its_sentinels(sentinels, spiece, tmp_path):
    """transformers 5 writes only tokenizer.json of the tokenizer; 512 rows are more than any tokenizer here needs."""
    theirs = transformers.T5Tokenizer.from_pretrained(spiece.parent, extra_ids=sentinels)
    model_of("T5 v1.0", vocab_size=512).save_pretrained(tmp_path / "saved")
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/spiece.model").exists()
    config = import_(tmp_path / "saved", tmp_path / "imported")
    assert (config.vocab_size, config.padded_vocab_size) == (PIECES + sentinels, 512)
    ours = TrainedModel.open(tmp_path / "imported").tokenizer
    assert (ours.vocab_size, ours.special_tokens, ours.sentinels) == (PIECES, (), sentinels)
    ids = ours.encode(TEXTS)
    assert ids == [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert ids == SentencePiece.read(spiece).encode(TEXTS)
    assert list(map(ours.decode, ids)) == list(map(SentencePiece.read(spiece).decode, ids))
    if sentinels:
        text = "Subject to the <extra_id_0> of this License, each <extra_id_1> hereby grants"
        assert ours.encode_with_sentinels(text) == theirs(text).input_ids


@each("sentinels", [None, 0, 50, 200])
def test_a_spiece_model_has_as_many_sentinels_as_its_config_says(sentinels, spiece, tmp_path):
    """The first T5s don't list theirs: there are 100."""
    shutil.copy(spiece, tmp_path)
    if sentinels is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": sentinels}))
    ours = tokenizer_files.read(tmp_path)
    theirs = transformers.T5Tokenizer.from_pretrained(tmp_path)
    assert (ours.size, ours.sentinels) == (len(theirs), 100 if sentinels is None else sentinels)
    if ours.sentinels:
        assert theirs.convert_tokens_to_ids("<extra_id_0>") == ours.vocabulary.first_sentinel


SAVED = {
    "sentencepiece": lambda spiece: ("T5 v1.0", transformers.T5Tokenizer.from_pretrained(spiece.parent, extra_ids=50)),
    "bytes": lambda spiece: ("T5 v1.0", transformers.ByT5Tokenizer(extra_ids=7)),
    "tokenizer_json": lambda spiece: ("BART", transformers.BartTokenizer(vocab=BARTS, merges=[("t", "h")])),
}
BARTS = {token: id_ for id_, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "t", "h", "th", "<mask>"])}


@each("kind", SAVED)
def test_an_import_prints_what_run_and_corpus_files_say(kind, spiece, tmp_path, monkeypatch):
    """A corpus of the printed section has the imported tokenizer."""
    monkeypatch.chdir(tmp_path)
    name, theirs = SAVED[kind](spiece)
    roles = {f"{role}_token_id": getattr(theirs, f"{role}_token_id") for role in ("pad", "eos", "bos")}
    start = roles["pad_token_id" if name == "T5 v1.0" else "eos_token_id"]
    model_of(name, vocab_size=512, **roles, decoder_start_token_id=start).save_pretrained("saved")
    theirs.save_pretrained("saved")
    printed = dict(re.findall(r"(tokenizer|extends): (.+)", done_here("pretrain", "import", "saved", "start")))
    assert yaml.safe_load(printed["extends"]) == ["start/model.yaml"]
    assert (tmp_path / "start/model.yaml").exists()
    section = yaml.safe_load(printed["tokenizer"])
    assert section["kind"] == kind
    file = write_corpus_file(tmp_path / "corpus.yaml", tokenizer=section)
    config = config_file.load(file, [], CorpusConfig).tokenizer
    of_corpus = Tokenizer(config.existing(), config.special_tokens, config.sentinels)
    assert of_corpus.describe() == load(tmp_path / "start").describe()


OWN = 20


def with_own_sentinels(spiece, folder, kind="USER_DEFINED"):
    """mT5's form of spiece.model: its last pieces are ▁<extra_id_19> to ▁<extra_id_0>, as its 100 are."""
    model = protocol.ModelProto.FromString(spiece.read_bytes())
    for number in reversed(range(OWN)):
        piece = model.SentencePiece.Type.Value(kind)
        model.pieces.add(piece=f"\u2581<extra_id_{number}>", score=0.0, type=piece)
    folder.mkdir()
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 0, "tokenizer_class": "T5Tokenizer"}))
    return folder


@each("kind", ["NORMAL", "USER_DEFINED"])
@each("is_saved", [False, True])
def test_the_sentinels_in_mt5s_file_are_the_sentinels(kind, is_saved, spiece, tmp_path, modules_of_transformers):
    """With the ids that mT5 was trained with. `is_saved`: transformers 5 has written a tokenizer.json."""
    folder = with_own_sentinels(spiece, tmp_path / "mt5", kind)
    theirs = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=0)
    if is_saved:
        (folder / "spiece.model").unlink()
        theirs.save_pretrained(folder)
    model_of("mT5", vocab_size=PIECES + OWN + 12).save_pretrained(folder)
    config = import_(folder, tmp_path / "imported")
    assert (config.vocab_size, config.padded_vocab_size) == (PIECES + OWN, PIECES + OWN + 12)
    trained = TrainedModel.open(tmp_path / "imported")
    ours = trained.tokenizer
    assert (ours.vocab_size, ours.special_tokens, ours.sentinels) == (PIECES, (), OWN)
    assert {ours.vocabulary.sentinel(number) for number in range(OWN)} == {*range(PIECES, PIECES + OWN)}
    for number in (0, 1, OWN - 1):
        assert theirs.convert_ids_to_tokens(ours.vocabulary.sentinel(number)) == f"\u2581<extra_id_{number}>"
    assert ours.encode(TEXTS) == SentencePiece.read(spiece).encode(TEXTS)
    spelled = "The <extra_id_0> here is text"
    assert max(ours.encode([spelled])[0]) < PIECES
    ids = ours.encode_with_sentinels(spelled)
    export(trained.model.state_dict(), config, ours, tmp_path / "exported")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported(spelled).input_ids == ids
    assert ours.vocabulary.first_sentinel in ids
    again = tokenizer_files.read(tmp_path / "exported")
    assert (again.sha256, again.names) == (ours.sha256, ours.names)


def test_a_corpus_takes_the_sentinels_of_mt5s_file(spiece, tmp_path):
    folder = with_own_sentinels(spiece, tmp_path / "mt5")
    model = SentencePiece.read(folder)
    assert (model.size, model.files["spiece.model"]) == (PIECES, (folder / "spiece.model").read_bytes())
    assert Tokenizer(model, [], OWN).names == tokenizer_files.read(folder).names
    assert Tokenizer(model).size == PIECES  # an objective without sentinels
    with pytest.raises(UserError, match=r"tokenizer\.sentinels: 19, but the tokenizer's file has 20"):
        Tokenizer(model, [], OWN - 1)


def test_two_tokenizers_in_a_directory_are_refused(spiece, tmp_path):
    transformers.T5Tokenizer.from_pretrained(spiece.parent).save_pretrained(tmp_path)
    shutil.copy(spiece, tmp_path)
    assert tokenizer_files.read(tmp_path).sha256 == SentencePiece.read(spiece).sha256  # the file as it is
    saved = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(saved.replace('"▁the"', '"▁tha"'))
    with pytest.raises(UserError, match=r"spiece\.model and tokenizer\.json are two different tokenizers"):
        tokenizer_files.read(tmp_path)


@each("kind", slow("gpt2", "bart", "roberta"))
def test_byte_level_bpe_that_transformers_saved_is_read(kind, byte_level_bpe, tmp_path):
    ours = tokenizer_json.read(byte_level_bpe / kind.replace("roberta", "bart"))
    (tmp_path / "files").mkdir()
    of_bart = kind != "gpt2"
    shutil.copy(byte_level_bpe / ("bart/vocab.json" if of_bart else "gpt2/encoder.json"), tmp_path / "files/vocab.json")
    shutil.copy(byte_level_bpe / ("bart/merges.txt" if of_bart else "gpt2/vocab.bpe"), tmp_path / "files/merges.txt")
    names = {"gpt2": "GPT2TokenizerFast", "bart": "BartTokenizer", "roberta": "RobertaTokenizer"}
    cls = getattr(transformers, names[kind])
    theirs = cls.from_pretrained(tmp_path / "files")
    theirs.save_pretrained(tmp_path / "saved")
    found = tokenizer_files.read(tmp_path / "saved")
    assert found.encode(TEXTS) == ours.encode(TEXTS)
    assert found.vocabulary.eos == ours.vocabulary.eos
    assert found.encode(TEXTS) == [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    theirs = cls.from_pretrained(tmp_path / "files", add_prefix_space=True)
    theirs.save_pretrained(tmp_path / "prefixed")
    expected = [theirs(text, add_special_tokens=False).input_ids for text in TEXTS]
    assert expected != found.encode(TEXTS)
    assert tokenizer_files.read(tmp_path / "prefixed").encode(TEXTS) == expected


def test_a_decoder_that_would_start_from_another_token_than_theirs_is_refused(tmp_path):
    """The tokenizer's padding is ours, and a T5 starts from it; config.json has another start."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    special = ["<pad>", "</s>", "<unk>", "<padding>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(TEXTS, trainer)
    model_of("T5 v1.0", vocab_size=270).save_pretrained(tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    assert import_(tmp_path, tmp_path / "imported").decoder_start_id == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, "pad_token": "<padding>"}))
    with pytest.raises(UserError, match="decoder_start_token_id is 0, but our t5 starts from padding, 3"):
        import_(tmp_path, tmp_path / "refused")


def test_other_tokenizers_are_refused_by_name(spiece, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    (tmp_path / "words").mkdir()
    words.save(str(tmp_path / "words/tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: tokenizers here don't support this: .* not 2"):
        tokenizer_files.read(tmp_path / "words")
    transformers.T5Tokenizer.from_pretrained(spiece.parent).save_pretrained(tmp_path / "t5")
    path = tmp_path / "t5/tokenizer.json"
    whole = json.loads(path.read_text())
    lower = {"type": "Sequence", "normalizers": [whole["normalizer"], {"type": "Lowercase"}]}
    words_alone = {"type": "WhitespaceSplit"}
    for saved, change, message in [
        (whole, {"normalizer": lower}, "the normalizer is Sequence"),
        (whole, {"pre_tokenizer": words_alone}, "the pre_tokenizer is not T5's"),
        (whole, {"model": {**whole["model"], "unk_id": 7}}, "unk_id is 7, not 2"),
    ]:
        path.write_text(json.dumps({**saved, **change}))
        with pytest.raises(UserError, match=message):
            tokenizer_files.read(tmp_path / "t5")
    for content in (json.dumps({**whole, "model": {"type": "Unigram", "vocab": 3}}), "{"):
        path.write_text(content)
        with pytest.raises(FailedError, match=r"tokenizer\.json: damaged: "):
            tokenizer_files.read(tmp_path / "t5")
    path.unlink()
    with pytest.raises(UserError, match=r"no supported tokenizer: neither spiece\.model, nor"):
        tokenizer_files.read(tmp_path / "t5")


# BERT with its WordPiece tokenizer


WORDPIECE_TEXTS = [*TEXTS, "Other texts have [SEP] [MASK]x", "w" * 101, ""]
MARKS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def vocabulary():
    """Marks, all characters of the texts as beginnings and continuations, and the words of the licence."""
    text = "\n".join(WORDPIECE_TEXTS)
    characters = sorted({character for character in text + text.lower() if not character.isspace()})
    words = sorted({word for word in text.split() if word.isalpha()} | {word.lower() for word in text.split()})
    tokens = dict.fromkeys([*MARKS, *characters, *(f"##{character}" for character in characters), *words, "##ing"])
    return {token: id_ for id_, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT as transformers saves it, with an uncased tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = transformers.BertTokenizer(vocab=vocabulary())
    config = transformers.BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **WIDTHS)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@each("cased", [False, True])
def test_wordpiece_has_the_ids_of_berts_tokenizer(cased, tmp_path):
    theirs = transformers.BertTokenizer(vocab=vocabulary(), do_lower_case=not cased)
    theirs.save_pretrained(tmp_path)
    ours = tokenizer_files.read(tmp_path)
    plain = [text.replace("[SEP] [MASK]", "") for text in WORDPIECE_TEXTS]  # their marks match text, ours never do
    assert ours.encode(plain) == [theirs(text, add_special_tokens=False).input_ids for text in plain]
    marks = {ours.vocabulary.bos, ours.vocabulary.eos, ours.vocabulary.mask}
    assert not marks & {id_ for ids in ours.encode(WORDPIECE_TEXTS) for id_ in ids}
    assert ours.decode(ours.encode(["You may add, your own."])[0]).lower() == "you may add, your own."
    assert (ours.vocabulary.pad, ours.vocabulary.unk, ours.vocabulary.text[0]) == (0, 2, 6)
    (ing,) = (id_ for id_, token in ours.model.tokens.items() if token == "##ing")
    assert not ours.vocabulary.word_starts[ing]
    save(ours, tmp_path / "kept")
    assert load(tmp_path / "kept").describe() == ours.describe()


def test_googles_list_of_tokens_is_enough(tmp_path):
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary()), encoding="utf-8")
    theirs = transformers.BertTokenizer(vocab=vocabulary())
    found = tokenizer_files.read(tmp_path)
    assert found.encode(WORDPIECE_TEXTS[:20]) == [
        theirs(text, add_special_tokens=False).input_ids for text in WORDPIECE_TEXTS[:20]
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert tokenizer_files.read(tmp_path).sha256 != found.sha256
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"vocab\.txt: lacks BERT's tokens \[PAD\], \[UNK\]"):
        tokenizer_json.read(tmp_path)


def test_a_bert_goes_there_and_back(bert, tmp_path):
    folder, tokenizer = bert
    config = import_(folder, tmp_path / "imported")
    assert (config.family, config.pad_id, config.eos_id) == ("encoder_only", 0, 4)
    trained = TrainedModel.open(tmp_path / "imported")
    export(trained.model.state_dict(), trained.model.config, trained.tokenizer, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in WORDPIECE_TEXTS[:30]:
        assert again(text).input_ids == tokenizer(text).input_ids
    pair = again("a text", "and another", return_token_type_ids=True)
    assert pair.input_ids == tokenizer("a text", "and another").input_ids
    assert (again.cls_token, again.sep_token, again.mask_token) == ("[CLS]", "[SEP]", "[MASK]")
    assert tokenizer_files.read(tmp_path / "out").describe() == trained.tokenizer.describe()
