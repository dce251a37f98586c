"""`pretrain evaluate`: which corpora a checkpoint is evaluated on, and how they are read."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.index import Index
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from tests.support.runs import run_file
from tests.support.small_evaluations import CAUSAL, T5, evaluated, evaluation_of

LOSS = ["validation_loss"]


def saved(
    folder: Path, family: dict, tokenizer: Tokenizer, run: Path | None = None, origin: Index | None = None
) -> Path:
    """A checkpoint of random weights, with the run file `run` and the step of `origin`."""
    model, _ = evaluation_of(family, tokenizer)
    save_weights(model.config, model.state_dict(), tokenizer, folder / "saved", origin, run)
    return folder / "saved"


def metrics(*arguments) -> dict[str, float]:
    """The losses of an evaluation, without how long it took."""
    found = json.loads(evaluated(*arguments, names=LOSS))
    return {name: value for name, value in found.items() if name.startswith("validation/")}


def data(corpus: object, **changes: object) -> dict[str, object]:
    return {"train": [{"corpus": str(corpus)}], "validation": [{"corpus": str(corpus)}], **changes}


def test_a_corpus_whose_ids_mean_something_else_is_refused(small_corpus, tmp_path):
    """The same text model, and as many ids: of a special token and one sentinel less."""
    tokenizer = open_corpus(small_corpus).tokenizer
    other = Tokenizer(tokenizer.model, ["[R]"], tokenizer.sentinels - 1)
    found = f"{small_corpus}: built with another tokenizer than the model's: tokenizer.sentinels is 19 there, 20 here; "
    with pytest.raises(UserError, match=re.escape(found)):
        evaluated(saved(tmp_path, T5, other), [small_corpus], LOSS)


def test_a_corpus_that_is_given_is_evaluated_with_the_objective_of_the_run(small_corpus, tmp_path):
    """A decoder's, which the corpus itself, built for span corruption, doesn't have."""
    corpus = open_corpus(small_corpus)
    objective = {"name": "causal_lm", "length": corpus.manifest.rows.raw_length - 1}
    path = run_file(tmp_path, small_corpus, model=CAUSAL, data=data(small_corpus, objective=objective))
    checkpoint = saved(tmp_path, CAUSAL, corpus.tokenizer, path)
    own = metrics(checkpoint)
    assert own["validation/small/loss"] > 0
    assert metrics(checkpoint, [small_corpus]) == own


def test_a_corpus_whose_rows_do_not_fit_the_objective_of_the_run_keeps_its_own(
    small_corpus, corpus_built_with_noise, tmp_path, capsys
):
    corpus = open_corpus(small_corpus)
    objective = {"name": "prefix_lm", "length": corpus.manifest.rows.raw_length}
    path = run_file(tmp_path, small_corpus, model=T5, data=data(small_corpus, objective=objective))
    found = metrics(saved(tmp_path, T5, corpus.tokenizer, path), [corpus_built_with_noise])
    assert found["validation/small/loss"] > 0
    line = "evaluated with its own objective, span_corruption: its rows don't fit the run's, prefix_lm"
    assert f"{corpus_built_with_noise}: {line}\n" in capsys.readouterr().err


def test_corpora_are_read_with_the_cache_and_past_the_damage_of_the_run(small_corpus, tmp_path):
    """Every block of the copy is damaged."""
    copy = shutil.copytree(small_corpus, tmp_path / "corpus")
    blocks = open_corpus(copy).blocks("validation")
    for shard in (copy / "shards/validation").iterdir():
        content = bytearray(shard.read_bytes())
        for place in blocks.of_shard(f"shards/validation/{shard.name}").tolist():
            content[int(blocks.offset[place]) + 700] ^= 1
        shard.write_bytes(content)
    cache = {"directory": str(tmp_path / "cache")}
    path = run_file(tmp_path, copy, model=T5, data=data(f"file://{copy}", on_damage="skip", cache=cache))
    corpus = open_corpus(copy)
    found = metrics(saved(tmp_path, T5, corpus.tokenizer, path))
    assert found["validation/small/damaged_rows"] == corpus.rows("validation")
    assert [*(tmp_path / "cache/corpora").iterdir()]


def test_evaluations_of_several_checkpoints_share_a_table_in_any_order(small_corpus, tmp_path):
    """A second evaluation of a checkpoint replaces the first. A run that resumes drops the steps after its own."""
    tokenizer, hook = open_corpus(small_corpus).tokenizer, "{hook: samples, number: 1, max_new_tokens: 2}"
    index = checkpoint_index.read(saved(tmp_path, T5, tokenizer))
    for step in (2, 1):
        of_step = replace(index, train_state=replace(index.train_state, step=step))
        saved(tmp_path / str(step), T5, tokenizer, origin=of_step)
    for step in (2, 1, 1):
        evaluated(tmp_path / str(step) / "saved", [small_corpus], [hook], tmp_path / "out")
    assert [row["step"] for row in record.table(tmp_path / "out/samples.json")] == [1, 2]
    record.keep(tmp_path / "out", 1, EvalResult(tables={"samples": [{"written": "again"}]}))
    assert [row["step"] for row in record.table(tmp_path / "out/samples.json")] == [1]
