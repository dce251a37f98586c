"""Exported checkpoints, as transformers loads them, and their model cards."""

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from data_pipeline.base import stores
from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load as load_run
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer, tokenizer_json
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePiece
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import tensors
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.export import card, export, import_, load_state, tokenizer_files
from pretrain.export.card import Lineage
from pretrain.models import build, parse
from pretrain.models.state_dict_adapter import hf_models
from pretrain.run.metrics_file import read_metrics
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.data_pipeline.corpus.test_tokenizer import KEPT
from tests.pretrain.export.test_load import TEXTS
from tests.support.exported import randomise
from tests.support.forked import run_forked
from tests.support.hub_server import Hub, serving
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.large_tensors import LargeTensors
from tests.support.runs import run_file
from tests.support.slow import slow
from tests.support.small_families import FAMILIES, STACK
from tests.support.small_models import MODELS, as_at_the_start
from tests.support.tables import each

transformers = pytest.importorskip("transformers")

PIECES, BYTES = 300, 285


def tokenizer_of(spiece, sentinels=100, special_tokens=()):
    return Tokenizer(SentencePiece.read(spiece), special_tokens, sentinels)


def new_model():
    return as_at_the_start("t5", vocab_size=PIECES + 100)


def new_bart(tokenizer):
    vocabulary = tokenizer.vocabulary
    marks = {"vocab_size": tokenizer.size, "pad_id": vocabulary.pad, "eos_id": vocabulary.eos}
    return randomise(as_at_the_start("bart", **marks), std=0.3)


@pytest.fixture
def bart_tokenizer(spiece):
    return tokenizer_of(spiece, 20, ["<s>", "<mask>"])


FILES = {"README.md", "added_tokens.json", "config.json", "generation_config.json", "model.safetensors"}
FILES |= {"spiece.model", "tokenizer.json", "tokenizer_config.json"}


def test_an_export_is_these_files_and_overwrites_none(spiece, tmp_path):
    model, out = new_model(), tmp_path / "deep" / "out"
    export(model.state_dict(), model.config, tokenizer_of(spiece), out)
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # weights are as readable as the rest
    with pytest.raises(UserError, match="exists already"):
        export(model.state_dict(), model.config, tokenizer_of(spiece), out)


def test_a_failed_export_leaves_nothing(spiece, tmp_path):
    """A tensor without memory behind it can't be written; the other files have been by then."""
    model = new_model()
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    with pytest.raises(NotImplementedError, match="meta tensor"):
        export(state, model.config, tokenizer_of(spiece), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@each(
    "family, objective, special, sentinels, mask",
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
    ours = tokenizer_of(spiece, sentinels, special)
    tokenizer_files.write(ours, hf_models(family)[0], objective, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.mask_token == mask
    if mask:
        text = theirs("Subject to the " + mask + " of this License", add_special_tokens=False).input_ids
        assert text.count(theirs.mask_token_id) == 1
        expected = ours.vocabulary.first_sentinel if mask == "<extra_id_0>" else ours.vocabulary.mask
        assert theirs.mask_token_id == expected
    assert same(tokenizer_files.read(tmp_path), ours)


@each(
    "family, objective, begins, ends",
    [
        ("bart", None, True, True),
        ("bart", "denoising", True, True),
        ("bart", "text_to_text", False, True),
        ("encoder_only", "masked_lm", True, True),
        ("decoder_only", "causal_lm", False, False),
        ("decoder_only", "in_one_row", False, True),
    ],
)
def test_an_exported_tokenizer_puts_the_marks_of_training_around_a_text(
    family, objective, begins, ends, bart_tokenizer, tmp_path
):
    """And the card does so around ids."""
    tokenizer_files.write(bart_tokenizer, hf_models(family)[0], objective, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, (ids,) = bart_tokenizer.vocabulary, bart_tokenizer.encode("the License")
    assert theirs("the License").input_ids == [*[vocabulary.bos] * begins, *ids, *[vocabulary.eos] * ends]
    of_ids, config = Tokenizer(Ids(9), ["<s>"]), as_at_the_start({"encoder_only": "bert"}.get(family, family)).config
    page = card.page(Lineage(objective=objective), config, hf_models(family)[0], of_ids)
    assert f"torch.tensor([{[*[11] * begins, 0, 1, 2, *[10] * ends]}])" in page


def test_a_program_that_asks_for_a_processor_gets_the_tokenizer_of_a_t5gemma2(spiece, tmp_path):
    model = as_at_the_start("t5gemma2", vocab_size=PIECES + 20, pad_vocab_to_multiple_of=64)
    export(model.state_dict(), model.config, tokenizer_of(spiece, 20), tmp_path / "out")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert processor("a text").input_ids == tokenizer("a text").input_ids
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


def same(one, other):
    """Whether two tokenizers give the same ids. What an export's tokenizer.json puts around a text decides none."""
    alike = {"files": {}} if other.model.kind == "tokenizer_json" else {}
    return one.sha256 == other.sha256 and replace(one.describe(), **alike) == replace(other.describe(), **alike)


SPECIAL = ("<s>", "[R]", "<mask>")
INSIDE = (
    "the <extra_id_0> of this License, each <extra_id_1> grants.",
    "MKT<extra_id_0>AY<extra_id_1>, the <extra_id_2>",
)
UNCHANGED = {
    "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True, "user_defined_symbols": ["\n", "\r", "\t"],
}  # fmt: skip
OF_PIECES, OF_BART = {"pad": 0, "eos": 1, "unk": 2}, {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 50_264}


@each(
    "kind, family, special, sentinels, marks",
    [
        ("pieces", "t5", (), 100, OF_PIECES),
        ("pieces", "t5", (), 20, OF_PIECES),
        ("pieces", "t5", SPECIAL, 20, {**OF_PIECES, "bos": 300, "mask": 302}),
        ("pieces", "bart", SPECIAL, 20, {**OF_PIECES, "bos": 300, "mask": 302}),
        ("pieces with bytes", "t5", (), 20, OF_PIECES),
        ("pieces as they are", "t5", (), 20, OF_PIECES),
        ("pieces as they are", "bart", SPECIAL, 20, {**OF_PIECES, "bos": BYTES, "mask": BYTES + 2}),
        ("bart", "t5", ("[R]",), 20, OF_BART),
        *slow(
            ("bart", "bart", ("[R]",), 20, OF_BART),
            ("bart", "t5", (), 0, OF_BART),
            ("gpt2", "t5", (), 0, {"bos": 50_256, "eos": 50_256, "pad": 50_256}),
        ),
    ],
)
def test_an_exported_tokenizer_has_the_same_ids_in_transformers_and_back(
    kind, family, special, sentinels, marks, spiece, byte_level_bpe, tmp_path
):
    texts = [*TEXTS, ""]
    if kind == "pieces":
        model = SentencePiece.read(spiece)
    elif kind == "pieces as they are":
        model, texts = with_bytes(**UNCHANGED), [*TEXTS, *KEPT, "the Queen ☃ and 東京  ", "a <0x41> \ne\u0301"]
    elif kind == "pieces with bytes":
        model, texts = with_bytes(), ["the Queen ☃ and 東京", "🙂🙂 cat", "a <0x41> <0xE6>", "<0x4", "\u00e9 Ω the"]
    else:
        model = tokenizer_json.read(byte_level_bpe / kind)
    ours = Tokenizer(model, special, sentinels)
    tokenizer_files.write(ours, hf_models(family)[0], None, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert same(tokenizer_files.read(tmp_path), ours)
    assert len(theirs) == ours.size
    assert {name: getattr(theirs, f"{name}_token_id") for name in marks} == marks
    first = ours.size - sentinels - len(special)
    assert theirs.convert_tokens_to_ids(special) == list(range(first, first + len(special)))
    names = [f"<extra_id_{number}>" for number in range(sentinels)]
    assert theirs.convert_tokens_to_ids(names) == [ours.size - 1 - number for number in range(sentinels)]
    begin = [marks["bos"]] if family == "bart" else []
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert theirs(text).input_ids == [*begin, *ids, marks["eos"]]
        assert kind == "pieces" or theirs.decode(ids) == ours.decode(ids) == text
    for text in INSIDE if sentinels else ():
        assert theirs(text).input_ids == [*begin, *ours.encode_with_sentinels(text)]
    if kind == "bart":
        assert theirs("a <mask>", add_special_tokens=False).input_ids == [102, 50_264]  # no space is left over
        assert [theirs(name, add_special_tokens=False).input_ids for name in special] == [[50_265] for _ in special]
        theirs.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved/vocab.json").exists()  # transformers 5 writes tokenizer.json alone
        assert same(tokenizer_files.read(tmp_path / "saved"), ours)
    if model.kind == "sentencepiece" and model.byte_ids:
        (tmp_path / "spiece.model").unlink()
        without = tokenizer_files.read(tmp_path)
        assert without.encode(texts) == ours.encode(texts)
        assert [*map(without.encode_with_sentinels, INSIDE)] == [*map(ours.encode_with_sentinels, INSIDE)]
        assert (without.model.byte_ids, without.sentinels) == (model.byte_ids, 20)


def with_bytes(**options):
    model, sample = io.BytesIO(), ["the cat sat on the mat.", "King Zog: a <hat> 0x4!"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_writer=model, vocab_size=BYTES if options else 283, byte_fallback=True,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1, minloglevel=2, **options,
    )  # fmt: skip
    return SentencePiece(model.getvalue(), "bytes")


# ---- import


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


@each("file", ["model.safetensors", "pytorch_model.bin"])
def test_an_import_of_bf16_converts_a_block_at_a_time(file, bart_tokenizer, tmp_path, monkeypatch):
    """No tensor in fp32 is larger than a block: the weights are mapped from the file until they are written."""
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    stored = {name: one.bfloat16() for name, one in load_file(tmp_path / "out/model.safetensors").items()}
    (tmp_path / "out/model.safetensors").unlink()
    save = torch.save if file.endswith(".bin") else save_file
    save(stored, tmp_path / "out" / file)
    monkeypatch.setattr(tensors, "_BLOCK", 2048)
    assert max(tensor.nbytes for tensor in stored.values()) > 16_000
    with LargeTensors(2049) as watched:
        import_(tmp_path / "out", tmp_path / "imported")
    made = [one for one in watched.made.values() if one.device.type == "cpu" and one.dtype == torch.float32]
    assert [tuple(one.shape) for one in made] == []
    found = TrainedModel.open(tmp_path / "imported").model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float()), name


def test_an_export_in_bf16_has_rounded_weights_and_is_imported_again(checkpoint, tmp_path):
    done_here("pretrain", "export", checkpoint, tmp_path / "fp32")
    done_here("pretrain", "export", checkpoint, tmp_path / "bf16", "--dtype", "bf16")
    whole, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "bf16"))
    assert {one.dtype for one in whole.values()} == {torch.float32}
    assert whole.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], one.bfloat16()) for name, one in whole.items())
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert saved["dtype"] == str(dtype).removeprefix("torch.")
        assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).dtype == dtype
    import_(tmp_path / "bf16", tmp_path / "imported")
    found, state = (TrainedModel.open(path).model.state_dict() for path in (tmp_path / "imported", checkpoint))
    assert all(torch.equal(found[name], one.bfloat16().float()) for name, one in state.items())


def test_a_config_that_contradicts_its_tokenizer_is_refused(bart_tokenizer, tmp_path):
    model = new_bart(bart_tokenizer)
    export(model.state_dict(), model.config, bart_tokenizer, tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps({**saved, "pad_token_id": 7}))
    with pytest.raises(UserError, match=r"pad_token_id is 7 in config\.json, but the tokenizer's is 0"):
        import_(tmp_path / "out", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


# ---- a run from imported weights


def test_a_run_starts_from_imported_weights(small_corpus, tmp_path):
    tokenizer = open_corpus(small_corpus).tokenizer
    model = new_bart(tokenizer)
    model.lm_head.final_logits_bias.normal_()
    export(model.state_dict(), model.config, tokenizer, tmp_path / "hf")
    done = run_forked("import", tmp_path / "hf", tmp_path / "imported")
    assert done.returncode == 0, done.stderr
    assert "lm_head.final_logits_bias is kept: 520 of its numbers aren't 0" in done.stdout
    path = run_file(
        tmp_path,
        small_corpus,
        run={"max_steps": 2},
        model={**MODELS["bart"], "dropout_rate": 0.3},  # which may differ
        batch={"global_batch_size": 4},
        optimizer={"learning_rate": 1e-10},
        checkpoint={"every_steps": 1, "init_from": str(tmp_path / "imported")},
        evaluation=[],
    )
    with pytest.raises(UserError) as refused:
        prepare(
            load_run(path, ["model.d_ff=32", "model.pad_vocab_to_multiple_of=128"], RunConfig), World.on_this_node()
        )
    assert f"checkpoint.init_from: {tmp_path}/imported: d_ff is 48 there, 32 here" in str(refused.value)
    assert "rows of the embedding matrix is 520 there, 640 here" in str(refused.value)
    t5 = {**json.loads(path.read_text()), "model": MODELS["t5"]}
    with pytest.raises(UserError, match="family is 'bart' there, 't5' here"):
        prepare(RunConfig.model_validate(t5), World.on_this_node())
    takes = r"model: takes sequences of 31 tokens at most, .*/corpus gives up to 32 inputs and 8 targets"
    with pytest.raises(UserError, match=takes):
        prepare(load_run(path, ["model.max_positions=31"], RunConfig), World.on_this_node())
    way_out = f", but a model of transformers; pretrain import {tmp_path}/hf OUT makes a checkpoint"
    for there, found in (("nowhere", ""), (f"{tmp_path}/hf", way_out)):
        with pytest.raises(UserError) as refused:
            prepare(load_run(path, [f"checkpoint.init_from={there}"], RunConfig), World.on_this_node())
        assert str(refused.value) == f"checkpoint.init_from: {there}: not a checkpoint: no index.json{found}"

    done = run_forked("train", path, "--stop-at-step", "1")
    assert done.returncode == 75, done.stderr
    assert f"starts from the weights in {tmp_path}/imported" in done.stdout
    (tmp_path / "imported/rank-00000.safetensors").unlink()  # once begun, the run no longer needs it
    assert run_forked("train", path).returncode == 0
    for step in (1, 2):
        trained = TrainedModel.open(tmp_path / f"run/checkpoints/step-{step:08d}").model
        assert trained.config.dropout_rate == 0.3
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[name], tensor, rtol=0, atol=1e-8)


# ---- the model card, compared with the files it tells of


@pytest.fixture(scope="module")
def run(small_corpus, tmp_path_factory):
    """A finished run of 8 steps."""
    folder = tmp_path_factory.mktemp("card")
    path = run_file(folder, small_corpus, run={"name": "a-run", "seed": 11})
    done = run_forked("train", path)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def exported(checkpoint, out, *options):
    done_here("pretrain", "export", checkpoint, out, *options)
    card = ModelCard((out / "README.md").read_text(encoding="utf-8"))
    return card.data.to_dict(), card.text


def facts(text):
    """The cells of all tables of two columns or more: the last ones by the first."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def test_the_card_has_the_figures_of_run_and_corpus(run, small_corpus, tmp_path):
    metadata, text = exported(run, tmp_path / "out")
    found = facts(text)
    assert metadata == {"language": ["en"], "library_name": "transformers", "tags": ["t5", "encdec-pretrain"]}
    assert text.strip().startswith("# a-run\n")
    assert "8 steps on 128 rows." in text
    digest = hashlib.sha256((small_corpus / "manifest.json").read_bytes()).hexdigest()
    assert "128 rows read.\n\n- c4, en\n" in text
    assert f"- sha256 of the corpus's manifest: `{digest}`" in text
    metrics = read_metrics(run)
    loss = metrics[-1].metrics["validation/small/loss"]
    assert float(found["validation/small/loss"][0]) == pytest.approx(loss, rel=1e-5)
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["run"] == {"seed": 11, "max_steps": 8}
    assert settings["model"]["d_model"] == 32
    assert str(run.parent) not in text  # no path of this machine


def test_the_card_has_nothing_of_later_steps_and_of_what_is_not_known(run, tmp_path):
    _, text = exported(run / "checkpoints/step-00000004", tmp_path / "out")
    assert "4 steps on 64 rows." in text
    assert "## Evaluation" not in text  # at step 8 alone
    import_(tmp_path / "out", tmp_path / "imported")
    metadata, text = exported(tmp_path / "imported", tmp_path / "again")
    assert "language" not in metadata
    for absent in ("## Training", "## Evaluation", "## Settings", "None"):
        assert absent not in text
    assert "## How to load it" in text


def test_the_card_of_a_run_from_other_weights_names_them_without_their_path(run, tmp_path):
    checkpoint = tmp_path / "step-00000008"
    shutil.copytree(run / "checkpoints/step-00000008", checkpoint)
    config = yaml.safe_load((checkpoint / "config.yaml").read_text())
    config["checkpoint"]["init_from"] = "/home/ada/imported/t5-small"
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(config))
    metadata, text = exported(checkpoint, tmp_path / "out")
    assert "parameters, trained with encdec-pretrain.\n\nStarts from: `t5-small`.\n" in text
    assert "/home/ada" not in text
    assert "base_model" not in metadata
    _, text = exported(run, tmp_path / "from random weights")
    assert "parameters, pretrained with encdec-pretrain.\n\n## How to load it" in text


def test_the_card_names_the_datasets_of_the_hub_that_a_corpus_is_built_from(small_corpus):
    corpus, model = open_corpus(small_corpus), new_model()
    corpus.manifest.config["sources"][0]["commits"] = {"datasets/allenai/c4": "0" * 40, "me/texts": "1" * 40}
    lineage = Lineage(sources=corpus.manifest.config["sources"])
    page = card.page(lineage, model.config, hf_models("t5")[0], corpus.tokenizer)
    assert ModelCard(page).data.to_dict()["datasets"] == ["allenai/c4"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(stores, "_FIRST_PAUSE", 0.01)
    yield from serving(monkeypatch, "hf_writes")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(spiece, tmp_path) -> Path:
    model = new_model()
    export(model.state_dict(), model.config, tokenizer_of(spiece), tmp_path / "first")
    import_(tmp_path / "first", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


HEADS = {"head_dim": 32, "query_pre_attn_scalar": 24}
# Models without keys that a run file before them sets, and the keys.
EXTENDED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "t5": ({**FAMILIES["t5"], "tie_embeddings": True}, {"tie_embeddings": False, "scale_outputs": True}),
    "t5gemma": (FAMILIES["t5gemma"], {"encoder": HEADS, "decoder": HEADS, "rope_base": 1e6}),
    "t5gemma2": (FAMILIES["t5gemma2"], {**HEADS, "window_rope_base": 1e5, "mup": {"base_width": 32}}),
    "modern": (
        {"family": "modern", "encoder": STACK, "decoder": STACK},
        {"encoder": HEADS, "attention_softcap": 5.0, "sliding_window": 4, "tie_embeddings": "none"},
    ),
}


@each("family", EXTENDED)
def test_a_run_file_that_extends_an_import_has_the_imported_model(family, small_corpus, tmp_path):
    """The file before it sets keys that are null or other in the model. It still says how the run trains."""
    settings, before = EXTENDED[family]
    tokenizer = open_corpus(small_corpus).tokenizer
    model = randomise(build(parse({**settings, "vocab_size": tokenizer.size, "pad_vocab_to_multiple_of": 128})))
    export(model.state_dict(), model.config, tokenizer, tmp_path / "exported")
    imported = import_(tmp_path / "exported", tmp_path / "start")
    write_json(tmp_path / "base.yaml", {"model": {"family": family, **before, "z_loss": 1e-4}})
    path = run_file(
        tmp_path,
        small_corpus,
        extends=["base.yaml", "start/model.yaml"],
        model={},
        checkpoint={"init_from": str(tmp_path / "start")},
    )
    prepared = prepare(load_run(path, [], RunConfig), World.on_this_node()).model
    assert prepared == imported.model_copy(update={"z_loss": 1e-4})

    again = TrainedModel.open(tmp_path / "start")
    export(again.model.state_dict(), again.model.config, again.tokenizer, tmp_path / "once more")
    assert import_(tmp_path / "once more", tmp_path / "again") == imported
    first, second = files_of(tmp_path / "start"), files_of(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_an_export_is_for_sentence_transformers_too(checkpoint, tmp_path):
    done_here("pretrain", "export", checkpoint, tmp_path / "plain")
    done_here("pretrain", "export", checkpoint, tmp_path / "out", "--for", "sentence-transformers")
    plain, found = files_of(tmp_path / "plain"), files_of(tmp_path / "out")
    assert plain.items() <= found.items()
    assert found.keys() - plain.keys() == {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    line = refused_here(2, "pretrain", "export", checkpoint, tmp_path / "other", "--for", "ctranslate2")
    assert line == "error: --for: expected sentence-transformers, got 'ctranslate2'; others read an export as it is"


def test_an_export_is_sent_to_a_private_repository_of_the_hub(hub, checkpoint, tmp_path):
    out = tmp_path / "out"
    told = done_here("pretrain", "export", checkpoint, out, "--push-to-hub", "me/mine").splitlines()
    repository = hub.repositories["models/me/mine"]
    (commit,) = repository.commits
    assert repository.private
    assert repository.commits[commit] == files_of(out)
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() in hub.large
    assert told[1] == f"sent: {hub.url}/me/mine/commit/{commit}"
    done_here("pretrain", "export", checkpoint, tmp_path / "public", "--push-to-hub", "me/public", "--public")
    assert not hub.repositories["models/me/public"].private


@each(
    "token, name, said",
    [
        ("hf_old", "mine", "401"),
        ("hf_writes", "my/own/model", "--push-to-hub: "),
        ("hf_reads", "mine", "403"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_way_out(hub, checkpoint, token, name, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    done = run_here("pretrain", "export", checkpoint, tmp_path / "out", "--push-to-hub", name)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, said in line) == (1, True)
    assert line.endswith(f"; to send it: hf upload {name} {tmp_path / 'out'} . --private")
    assert (tmp_path / "out/model.safetensors").exists()
    assert hub.repositories == {}
