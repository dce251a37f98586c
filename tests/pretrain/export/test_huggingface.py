"""Exported checkpoints, as transformers loads them, and runs from imported weights."""

import json

import pytest
import torch

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load as load_run
from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.export import export, import_
from pretrain.models import build, parse
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.support.exported import randomise
from tests.support.forked import run_forked
from tests.support.runs import run_file
from tests.support.small_exports import PIECES, files_of, new_bart, new_model, tokenizer_of
from tests.support.small_families import FAMILIES, STACK
from tests.support.small_models import MODELS, as_at_the_start
from tests.support.tables import each

transformers = pytest.importorskip("transformers")

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


# ---- import


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
