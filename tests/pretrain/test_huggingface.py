"""Exported checkpoints, as transformers loads them."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.corpus import open_corpus
from data_pipeline.foundation.config_file import load as load_run
from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from data_pipeline.tokenizer.sentencepiece import SentencePiece
from pretrain.checkpoint.initial import save_weights
from pretrain.checkpoint.trained import TrainedModel
from pretrain.config import RunConfig
from pretrain.huggingface import conversions, export, import_, load_state, tokenizer_export, tokenizer_import
from pretrain.models import BartConfig, T5Config, build, parse
from pretrain.trainer.validate import validate
from tests.in_process import run_here
from tests.pretrain.forked import run_forked
from tests.pretrain.runs import run_file
from tests.slow import slow

transformers = pytest.importorskip("transformers")

LICENSE = Path(__file__).parents[2] / "LICENSE"
PIECES = 300
SENTENCES = [
    "Unless required by applicable law or agreed to in writing, software is distributed on an AS IS basis.",
    'You may add Your own "copyright" statement;  two  spaces\tand a tab.',
    "Naïve façades of Ångström: ½ of the ﬁnal ＷＩＤＥ text, 日本語 too.",
    " \n ",
    "",
]


def tokenizer_of(spiece, sentinels=100, special_tokens=()):
    return Tokenizer(SentencePiece.read(spiece), special_tokens, sentinels)


def new_model(tied=False, sentinels=100, multiple=1):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=PIECES + sentinels,
        pad_vocab_to_multiple_of=multiple,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=3,
        feed_forward="relu" if tied else "gated-gelu",
        tie_embeddings=tied,
        dropout_rate=0.1,
    )
    return build(config).eval()


T5_SIZES = {
    "family": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}


def test_a_checkpoint_saved_again_by_transformers_keeps_its_two_matrices(spiece, tmp_path):
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    config, state = load_state(tmp_path / "again")
    assert config == model.config
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("sentinels", [100, 20])
def test_tokenizer_has_the_ids_of_sentencepiece(sentinels, spiece, tmp_path):
    model = new_model(sentinels=sentinels)
    export(model.state_dict(), model.config, tokenizer_of(spiece, sentinels), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
    size = PIECES + sentinels
    assert len(tokenizer) == size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    names = [f"<extra_id_{k}>" for k in range(sentinels)]
    assert tokenizer.convert_tokens_to_ids(names) == [size - 1 - k for k in range(sentinels)]
    lines = LICENSE.read_text(encoding="utf-8").splitlines()
    for text in SENTENCES + lines:
        assert tokenizer(text).input_ids == [*processor.encode(text), 1]

    masked = "Subject to the <extra_id_0> of this License, each <extra_id_1> hereby grants"
    first, second, third = "Subject to the", "of this License, each", "hereby grants"
    assert tokenizer(masked).input_ids == [
        *processor.encode(first), size - 1, *processor.encode(second), size - 2, *processor.encode(third), 1
    ]  # fmt: skip
    assert tokenizer.decode(processor.encode(lines[-1])) == processor.decode(processor.encode(lines[-1]))


def test_a_tokenizer_with_bytes_keeps_its_ids_in_transformers_and_back(tmp_path):
    """Also without spiece.model. Text that spells a byte is no byte."""
    model, sample = io.BytesIO(), ["the cat sat on the mat.", "King Zog: a <hat> 0x4!"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_writer=model, vocab_size=283, byte_fallback=True, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1,
    )  # fmt: skip
    tokenizer = Tokenizer(SentencePiece(model.getvalue(), "bytes"), (), 20)
    made = build(T5Config(**{**T5_SIZES, "vocab_size": tokenizer.size}))
    export(made.state_dict(), made.config, tokenizer, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["the Queen ☃ and 東京", "🙂🙂 cat", "a <0x41> <0xE6>", "<0x4", "\u00e9 Ω the"]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert theirs(text).input_ids == [*ids, 1]
        assert theirs.decode(ids) == tokenizer.decode(ids) == text
    assert theirs("a <extra_id_0> Q").input_ids == [*tokenizer.encode_with_sentinels("a <extra_id_0> Q")]
    assert tokenizer_import.read(tmp_path / "out").sha256 == tokenizer.sha256
    (tmp_path / "out/spiece.model").unlink()
    again = tokenizer_import.read(tmp_path / "out")
    assert again.encode(texts) == tokenizer.encode(texts)
    assert (again.model.byte_ids, again.sentinels) == (frozenset(range(3, 259)), 20)


def test_files(spiece, tmp_path):
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "README.md",
        "added_tokens.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_stands_there_is_not_overwritten(spiece, tmp_path):
    model = new_model()
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path)
    (tmp_path / "empty").mkdir()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_failed_export_leaves_nothing(spiece, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", fail)
    model = new_model()
    with pytest.raises(OSError, match="no space"):
        export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "objective", "special", "sentinels", "mask"),
    [
        ("t5", "span_corruption", (), 20, "<extra_id_0>"),
        ("t5gemma2", "span_corruption", ("<mask>", "<s>"), 20, "<extra_id_0>"),
        ("t5gemma2", None, (), 20, "<extra_id_0>"),
        ("bart", "denoising", ("<mask>", "<s>"), 20, "<mask>"),
        ("bart", None, ("<mask>", "<s>"), 20, "<mask>"),
        ("t5", "prefix_lm", (), 0, None),
    ],
)
def test_the_mask_token_is_the_blank_that_the_model_has_learnt_to_fill(
    family, objective, special, sentinels, mask, spiece, tmp_path
):
    ours = Tokenizer(SentencePiece.read(spiece), special, sentinels)
    tokenizer_export.write(ours, conversions(family)[0], objective, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.mask_token == mask
    if mask:
        text = theirs("Subject to the " + mask + " of this License", add_special_tokens=False).input_ids
        assert text.count(theirs.mask_token_id) == 1
        expected = ours.vocabulary.first_sentinel if mask == "<extra_id_0>" else ours.vocabulary.mask
        assert theirs.mask_token_id == expected
    assert same(tokenizer_import.read(tmp_path), ours)


def test_a_program_that_asks_for_a_processor_gets_the_tokenizer_of_a_t5gemma2(spiece, tmp_path):
    sizes = {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 2, "full_attention_every": 2}
    values = {"family": "t5gemma2", "vocab_size": PIECES + 20, "pad_vocab_to_multiple_of": 64, **sizes}
    model = build(parse(values))
    export(model.state_dict(), model.config, tokenizer_of(spiece, 20), tmp_path / "out")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    assert (
        processor("a text").input_ids
        == transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("a text").input_ids
    )
    assert processor.mask_token == "<extra_id_0>"


def test_what_does_not_fit_together_is_refused(spiece, tmp_path):
    model = new_model()
    with pytest.raises(UserError, match="300 tokens, 0 special tokens and 99 sentinels make 399 ids"):
        export(model.state_dict(), model.config, tokenizer_of(spiece, 99), tmp_path / "out")
    state = model.state_dict()
    del state["encoder.final_norm.weight"]
    with pytest.raises(UserError, match=r"encoder\.final_norm\.weight is missing"):
        export(state, model.config, tokenizer_of(spiece), tmp_path / "out")


# ---- tokenizers


def in_transformers(tokenizer, family, tmp_path):
    """The tokenizer that AutoTokenizer loads from the export of `tokenizer`, and the one that is read back."""
    tokenizer_export.write(tokenizer, conversions(family)[0], None, tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer_import.read(tmp_path)


def same(one, other):
    return one.describe() == other.describe()


@pytest.mark.parametrize(("special", "sentinels"), [(("[R]",), 20), *slow(((), 0))])
@pytest.mark.parametrize("family", ["t5", *slow("bart")])
def test_byte_level_bpe_has_the_same_ids_in_transformers(family, special, sentinels, byte_level_bpe, tmp_path):
    ours = Tokenizer(ByteLevelBPE.read(byte_level_bpe / "bart"), special, sentinels)
    theirs, again = in_transformers(ours, family, tmp_path)
    assert len(theirs) == ours.size
    assert same(again, ours)
    marks = [theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.mask_token_id]
    assert marks == [0, 1, 2, 3, 50_264]
    begin = [0] if family == "bart" else []
    for text in SENTENCES + LICENSE.read_text(encoding="utf-8").splitlines():
        (expected,) = ours.encode([text])
        assert theirs(text).input_ids == [*begin, *expected, 2]
        assert theirs.decode(expected) == text
    if sentinels:
        text = "see <extra_id_0> there <extra_id_1>."
        assert theirs(text).input_ids == [*begin, *ours.encode_with_sentinels(text)]
        assert theirs("[R]", add_special_tokens=False).input_ids == [50_265]
    assert theirs("a <mask>", add_special_tokens=False).input_ids == [102, 50_264]  # no space is left over


@pytest.mark.slow
def test_gpt2s_one_mark_is_begin_end_and_padding(byte_level_bpe, tmp_path):
    ours = Tokenizer(ByteLevelBPE.read(byte_level_bpe / "gpt2"))
    theirs, again = in_transformers(ours, "t5", tmp_path)
    assert same(again, ours)
    assert theirs("Hello world").input_ids == [15_496, 995, 50_256]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (50_256, 50_256, 50_256)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_special_tokens_stand_above_sentencepieces(family, spiece, tmp_path):
    ours = tokenizer_of(spiece, 20, ["<s>", "[R]", "<mask>"])
    theirs, again = in_transformers(ours, family, tmp_path)
    assert same(again, ours)
    assert len(theirs) == 323
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id, theirs.mask_token_id) == (0, 1, 300, 302)
    assert theirs.convert_tokens_to_ids(["[R]", "<extra_id_0>", "<extra_id_19>"]) == [301, 322, 303]
    begin = [300] if family == "bart" else []
    for text in SENTENCES + LICENSE.read_text(encoding="utf-8").splitlines():
        assert theirs(text).input_ids == [*begin, *ours.encode([text])[0], 1]
    text = "see <extra_id_0> there <extra_id_1>."
    assert theirs(text).input_ids == [*begin, *ours.encode_with_sentinels(text)]


@pytest.mark.slow
def test_a_tokenizer_that_transformers_saved_is_read(spiece, byte_level_bpe, tmp_path):
    """Transformers 5 writes tokenizer.json alone, without vocab.json, merges.txt or spiece.model."""
    ours = Tokenizer(ByteLevelBPE.read(byte_level_bpe / "bart"), ["[R]"], 5)
    (tmp_path / "out").mkdir()
    theirs, _ = in_transformers(ours, "bart", tmp_path / "out")
    theirs.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/vocab.json").exists()
    assert same(tokenizer_import.read(tmp_path / "saved"), ours)
    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "spiece.model").write_bytes(spiece.read_bytes())  # as in the first T5s, whose sentinels aren't listed
    assert same(tokenizer_import.read(t5), tokenizer_of(spiece, 100))
    (t5 / "spiece.model").unlink()
    with pytest.raises(UserError, match=r"no supported tokenizer: neither spiece\.model"):
        tokenizer_import.read(t5)


# ---- BART


def new_bart(tokenizer, **changes):
    torch.manual_seed(0)
    vocabulary = tokenizer.vocabulary
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    config = BartConfig(
        vocab_size=tokenizer.size,
        pad_id=vocabulary.pad,
        eos_id=vocabulary.eos,
        **{**sizes, "max_positions": 64, **changes},
    )
    model = build(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def bart_tokenizer(spiece):
    return tokenizer_of(spiece, 20, ["<s>", "<mask>"])


# ---- import


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("kind", ["v1.0", "v1.1", "v1.1, padded", "bart"])
def test_export_import_export_gives_the_same_files(kind, spiece, bart_tokenizer, tmp_path):
    if kind == "bart":
        tokenizer = bart_tokenizer
        model = new_bart(tokenizer)
    else:
        tokenizer = tokenizer_of(spiece)
        model = new_model(kind == "v1.0", multiple=128 if "padded" in kind else 1)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    assert import_(tmp_path / "out", tmp_path / "imported") == model.config
    trained = TrainedModel.open(tmp_path / "imported")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained.model.state_dict().items())
    export(trained.model.state_dict(), trained.model.config, trained.tokenizer, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


def test_what_transformers_saves_of_a_bart_is_imported(bart_tokenizer, tmp_path):
    """Also in bfloat16, and for a BartModel, whose names lack a prefix, as in facebook/bart-base."""
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out")
    theirs.save_pretrained(tmp_path / "again")
    theirs.model.save_pretrained(tmp_path / "inner")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    for name in ("again", "inner"):
        config, state = load_state(tmp_path / name)
        assert config == model.config
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    _, state = load_state(tmp_path / "rounded")
    rounded = model.state_dict()["embedding.weight"].bfloat16().float()
    assert state["embedding.weight"].dtype == torch.float32
    assert torch.equal(state["embedding.weight"], rounded)


def test_large_weights_are_written_in_shards(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out", shard_bytes=20_000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 1
    loaded, report = transformers.BartForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    _, state = load_state(tmp_path / "out")
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    (tmp_path / "out" / shards[1]).unlink()
    with pytest.raises(UserError, match=f"{shards[1]}: no such file, but model.safetensors.index.json names it"):
        load_state(tmp_path / "out")


def rewrite(directory, change=lambda tensors: None, **config):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    saved = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**saved, **config}))


def test_tensors_that_do_not_fit_are_named(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")

    def change(tensors):
        del tensors["model.encoder.layers.0.fc1.bias"]
        tensors["model.encoder.layers.7.fc1.bias"] = torch.zeros(3)
        tensors["model.decoder.layers.1.fc2.weight"] = torch.zeros(5, 4)

    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError) as refused:
        load_state(tmp_path / "out")
    assert "model.encoder.layers.0.fc1.bias is missing" in str(refused.value)
    assert "model.encoder.layers.7.fc1.bias is not of the model" in str(refused.value)
    assert "model.decoder.layers.1.fc2.weight should be (16, 24), is (5, 4)" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "pegasus"}, "model_type is 'pegasus', not one of t5, bart"),
        ({"decoder_attention_heads": 4}, "encoder_attention_heads is 2 and decoder_attention_heads is 4"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id is 0, but our bart starts from EOS, 1"),
        ({"activation_function": "swish"}, "activation_function is 'swish', not one of relu, gelu"),
        ({"pad_token_id": 7}, "pad_token_id is 7 in config.json, but the tokenizer's is 0"),
    ],
)
def test_what_our_bart_can_not_be_is_refused(config, why, bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    rewrite(tmp_path / "out", **config)
    with pytest.raises(UserError, match=why):
        import_(tmp_path / "out", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_bias_of_the_logits_is_kept(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    model.lm_head.final_logits_bias.normal_(std=3)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    done = run_here("pretrain", "import", tmp_path / "out", tmp_path / "imported")
    assert done.returncode == 0, done.stderr
    count = model.config.padded_vocab_size
    assert f"lm_head.final_logits_bias is kept as it is: {count} of its numbers aren't 0" in done.stdout
    trained = TrainedModel.open(tmp_path / "imported")
    assert torch.equal(trained.model.lm_head.final_logits_bias, model.lm_head.final_logits_bias)
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "out")
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected = theirs(input_ids=ids, decoder_input_ids=ids).logits
        found = trained.model.decode(ids, trained.model.encode(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_run_keeps_the_bias_of_the_logits_in_its_checkpoints(bart_tokenizer, small_corpus, tmp_path):
    trained_on = open_corpus(small_corpus).tokenizer
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    ids = {"vocab_size": trained_on.size, "pad_id": trained_on.vocabulary.pad, "eos_id": trained_on.vocabulary.eos}
    model = build(BartConfig(**ids, **sizes, max_positions=64))
    model.lm_head.final_logits_bias.normal_()
    save_weights(model.config, model.state_dict(), trained_on, tmp_path / "start")
    path = run_file(
        tmp_path,
        small_corpus,
        run={"max_steps": 2},
        model={"family": "bart", **sizes, "max_positions": 64},
        checkpoint={"every_steps": 1, "init_from": str(tmp_path / "start")},
        evaluation=[],
    )
    assert run_forked("train", path, "--stop-at-step", "1").returncode == 75
    assert run_forked("train", path).returncode == 0  # resumes
    for step in (1, 2):
        kept = TrainedModel.open(tmp_path / f"run/checkpoints/step-{step:08d}").model.lm_head.final_logits_bias
        assert torch.equal(kept, model.lm_head.final_logits_bias)


def test_other_matrices_than_ours_are_refused(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"lm_head.weight": tensors["model.shared.weight"] + 1}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.shared\.weight"):
        load_state(tmp_path / "out")


# ---- a run from imported weights


def test_a_run_starts_from_imported_weights(small_corpus, tmp_path):
    tokenizer = open_corpus(small_corpus).tokenizer
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = new_bart(tokenizer, **sizes)
    export(model.state_dict(), model.config, tokenizer, tmp_path / "hf")
    done = run_forked("import", tmp_path / "hf", tmp_path / "imported")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(
            {
                "run": {"name": "test", "directory": str(tmp_path / "run"), "max_steps": 1},
                "model": {
                    "family": "bart",
                    **sizes,
                    "max_positions": 64,
                    "dropout_rate": 0.3,  # a setting of training only, which may differ
                },
                "data": {"train": [{"corpus": str(small_corpus)}], "workers": 0, "lanes": 8},
                "batch": {"global_batch_size": 4},
                "optimizer": {"learning_rate": 1e-10},
                "precision": "fp32",
                "checkpoint": {"init_from": str(tmp_path / "imported")},
                "tracking": {"mlflow": None},
            }
        )
    )
    with pytest.raises(UserError) as refused:
        validate(load_run(path, ["model.d_ff=32", "model.pad_vocab_to_multiple_of=128"], RunConfig), 0, 1)
    assert f"checkpoint.init_from: {tmp_path}/imported: d_ff is 24 there, 32 here" in str(refused.value)
    assert "rows of the embedding matrix is 520 there, 640 here" in str(refused.value)
    values = json.loads(path.read_text())
    t5 = {**values, "model": T5_SIZES}
    with pytest.raises(UserError, match="family is 'bart' there, 't5' here"):
        validate(RunConfig.model_validate(t5), 0, 1)
    with pytest.raises(UserError, match=r"model: takes sequences of 16 tokens at most, .* gives up to 32 inputs"):
        validate(load_run(path, ["model.max_positions=16"], RunConfig), 0, 1)
    with pytest.raises(UserError, match=r"checkpoint\.init_from: nowhere: not a checkpoint"):
        validate(load_run(path, ["checkpoint.init_from=nowhere"], RunConfig), 0, 1)

    done = run_forked("train", path)
    assert done.returncode == 0, done.stderr
    assert f"starts from the weights in {tmp_path}/imported" in done.stdout
    trained = TrainedModel.open(tmp_path / "run/checkpoints/step-00000001").model
    assert trained.config.dropout_rate == 0.3
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=0, atol=1e-8)
    (tmp_path / "imported/rank-00000.safetensors").unlink()  # once begun, the run no longer needs it
    assert "is finished: 1 of 1 steps" in run_forked("train", path).stdout
