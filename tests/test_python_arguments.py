"""What functions for Python code say of wrong arguments, that a str is one text, and what objects say of themselves."""

from typing import Any

import numpy as np
import pytest
import torch

import data_pipeline
import launch
import pretrain
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.models import build, parse
from pretrain.tools.experiment import run_experiment
from pretrain.training.callback import Callback
from tests.support.runs import MODEL
from tests.support.tables import each


def untrained(corpus: data_pipeline.Corpus) -> pretrain.PretrainedModel:
    """A model for the corpus as it is before a run."""
    model = build(parse({**MODEL, "vocab_size": corpus.tokenizer.size}))
    return pretrain.PretrainedModel(TrainedModel(model, corpus.tokenizer))


def test_an_exported_model_has_the_losses_of_the_model(small_corpus, tmp_path):
    corpus = data_pipeline.open(small_corpus)
    model, batch = untrained(corpus).eval(), next(iter(corpus.loader("train", 4, seed=1)))
    model.export(tmp_path / "exported")
    again, tokenizer = pretrain.load(tmp_path / "exported")
    assert torch.equal(model(**batch)["labels"], again(**batch)["labels"])
    text = "The <extra_id_0> is red."
    assert tokenizer.encode_with_sentinels(text) == corpus.tokenizer.encode_with_sentinels(text)
    with pytest.raises(data_pipeline.UserError, match="exported: exists already; choose another directory"):
        model.export(tmp_path / "exported")


def test_a_tilde_in_a_path_is_the_home_directory(small_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    assert pretrain.Run("~/run").directory == tmp_path / "run"
    (tmp_path / "allowed.txt").write_text("The Work\n")
    untrained(data_pipeline.open(small_corpus)).generate("a", allowed="~/allowed.txt", output="~/answers.jsonl")
    assert (tmp_path / "answers.jsonl").exists()
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/runs.csv").write_text("row\na\n")

    def of_nothing(*given: Any) -> run_experiment.Outcome:
        return run_experiment.Outcome(0, given[4])

    monkeypatch.setattr(run_experiment, "experiment", of_nothing)
    assert len(pretrain.experiment("configs:speedrun/mini", out="~/exp")) == 1


@each(
    "call, said",
    [
        (lambda: pretrain.load("nowhere"), "nowhere"),
        (lambda: pretrain.Run(None), "None: no such directory"),
        (lambda: pretrain.Run("s3://bucket/run"), "s3://bucket/run is a URL; expected a path on this machine"),
        (
            lambda: pretrain.experiment("configs:speedrun/mini", out="s3://bucket/run"),
            "s3://bucket/run is a URL; expected a path on this machine",
        ),
        *(
            (
                lambda number=number: launch.local("configs:runs/quickstart.yaml", ranks=number),
                f"ranks: expected {said}",
            )
            for number, said in (
                (0, "1 to 1024, got 0"),
                (2.0, "an integer, got 2.0"),
                (True, "an integer, got True"),
            )
        ),
        *(
            (
                lambda entry=entry, start=start: start("configs:runs/quickstart.yaml", callbacks=[entry]),
                f"callbacks{said}",
            )
            for start, entry, said in (
                (launch.local, Callback(), ": expected values as in a YAML file, got <"),
                (pretrain.train, "a:B", r"\.0: expected keys and values, got 'a:B'"),
            )
        ),
        (lambda: pretrain.train("configs:runs/quickstart.yaml", callbacks=7), "callbacks: expected list of .*got 7"),
        (lambda: pretrain.train("nowhere.yaml"), "nowhere.yaml: no such file"),
        (lambda: pretrain.experiment("nowhere", seeds=0), "seeds: expected 1 to 1000, got 0"),
        (
            lambda: pretrain.train({"extends": "configs:runs/quickstart.yaml", "optimizer": {"learning_rat": 1}}),
            "config: optimizer.learning_rat: unknown key; nearest valid key: optimizer.learning_rate",
        ),
        (lambda: launch.local("nowhere.yaml"), "nowhere.yaml: no such file"),
        (
            lambda: pretrain.train("configs:runs/quickstart.yaml", stop_at_step=0),
            "stop_at_step: expected 1 or more, got 0",
        ),
        (
            lambda: launch.local("configs:runs/quickstart.yaml", stop_at_step=-1),
            "stop_at_step: expected 1 or more, got -1",
        ),
        (
            lambda: launch.local("configs:runs/quickstart.yaml", optimizer={"learning_rat": 1}),
            "optimizer.learning_rat: unknown key; nearest valid key: optimizer.learning_rate",
        ),
    ],
)
def test_a_wrong_argument_about_runs_is_one_line(tmp_path, monkeypatch, call, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(data_pipeline.UserError, match=said) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1


@each(
    "call, said",
    [
        (lambda corpus: corpus.examples("test"), "split: .*has train, validation, got 'test'"),
        (lambda corpus: corpus.documents(["test"]), r"split: .*has train, validation, got \['test'\]"),
        (lambda corpus: corpus.examples(epoch=-1), "epoch: expected 0 or more, got -1"),
        (lambda corpus: corpus.loader("train", 1.5), "batch_size: expected an integer, got 1.5"),
        (lambda corpus: corpus.loader("train", 2, workers=None), "workers: expected an integer, got None"),
        (lambda corpus: corpus.loader("train", 2, seed="a"), "seed: expected an integer, got 'a'"),
        (lambda corpus: corpus.loader("train", 2, lanes=0), "lanes: expected 1 to 1048576, got 0"),
        (lambda corpus: corpus.loader("train", 2, state="a"), "state: expected what a loader's state_dict.. gave"),
        (lambda corpus: corpus.loader("train", 0), "batch_size: expected 1 or more, got 0"),
        (lambda corpus: corpus.loader("train", 2, rank=2, ranks=2), "rank: expected 0 to 1, .* got 2"),
        (
            lambda corpus: corpus.loader("train", 2, state=corpus.loader("train", 2, seed=1).state_dict()),
            "another stream: seed is 1 there, 0 here",
        ),
        (lambda corpus: corpus.loader("train", 2, state={"split": "validation"}), "of the split 'validation'"),
        (lambda corpus: corpus.loader("train", 2, state={"split": "train", "position": "x"}), "damaged"),
        (lambda corpus: data_pipeline.objective("spans", corpus.tokenizer), "objective.name: expected one of"),
        (lambda corpus: data_pipeline.objective("text_to_text", corpus.tokenizer), "needs pairs of texts"),
        (
            lambda corpus: data_pipeline.objective("span_corruption", corpus.tokenizer, noise=0.3),
            "objective.noise: unknown key; nearest valid key: objective.noise_density",
        ),
        (
            lambda corpus: data_pipeline.objective("span_corruption", corpus.tokenizer, inputs_length=32)([9] * 99),
            "span_corruption: expected at most 34 tokens, got 99",
        ),
        (lambda corpus: data_pipeline.objective("causal_lm", "abc"), "tokenizer: expected the tokenizer of a corpus"),
        (lambda corpus: data_pipeline.objective("causal_lm", corpus.tokenizer)("abc"), "expected token ids, got 'abc'"),
        (lambda corpus: data_pipeline.objective("causal_lm", corpus.tokenizer)([3, -1]), "expected token ids .*got -1"),
        (lambda corpus: data_pipeline.objective("causal_lm", corpus.tokenizer)([3, 4], row=-1), "row: expected 0 or "),
        (lambda corpus: corpus.tokenizer.encode(1), "texts: expected a text or a list of texts, got 1"),
        (lambda corpus: corpus.tokenizer.encode_with_sentinels(None), "texts.0: expected a text, got None"),
        (lambda corpus: corpus.tokenizer.decode([-1]), "expected token ids from 0 to .*, got -1"),
        (
            lambda corpus: corpus.tokenizer.decode(torch.tensor([9, IGNORE_INDEX])),
            "expected token ids from 0 to .*, got -100; leave out the padding of labels",
        ),
        (lambda corpus: corpus.tokenizer.decode([corpus.tokenizer.size]), "expected token ids"),
        *(
            (lambda corpus, given=given: untrained(corpus).generate(given[0], **given[1]), said)
            for given, said in (
                ((["a", None], {}), "texts.1: expected a text, got None"),
                ((["a"], {"batch_size": 0}), "batch_size: expected 1 or more, got 0"),
            )
        ),
        (lambda corpus: data_pipeline.open("nowhere"), "nowhere/manifest.json: no such file"),
        (lambda corpus: data_pipeline.build("nowhere.yaml"), "nowhere.yaml: no such file"),
        (lambda corpus: data_pipeline.build("configs:corpora/nothing.yaml"), "no such file ships"),
        (
            lambda corpus: data_pipeline.build("configs:corpora/quickstart.yaml", tokenizer={"vocab_size": -1}),
            "tokenizer.vocab_size: expected integer",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(small_corpus, call, said):
    corpus = data_pipeline.open(small_corpus)
    with pytest.raises(data_pipeline.UserError, match=said) as raised:
        call(corpus)
    assert len(str(raised.value).splitlines()) == 1


def test_a_str_is_one_text(small_corpus):
    corpus = data_pipeline.open(small_corpus)
    tokenizer, model = corpus.tokenizer, untrained(corpus)
    assert tokenizer.encode("one text") == tokenizer.encode(["one text"]) == tokenizer.encode(("one text",))
    answers = model.generate("one text", max_new_tokens=2)
    assert answers == model.generate(iter(["one text"]), max_new_tokens=2)
    assert [one.text for one in answers] == ["one text"]
    assert tokenizer.decode(np.array(tokenizer.encode("one text")[0])) == "one text"


def test_each_object_says_in_a_line_what_it_is(small_corpus):
    corpus = data_pipeline.open(small_corpus)
    tokenizer, splits = corpus.tokenizer, corpus.manifest.splits
    ids, pieces = f"{tokenizer.size:,}", f"{tokenizer.vocab_size:,}"
    assert repr(corpus) == (
        f"Corpus('{small_corpus}': {splits['train'].rows:,} train rows, {splits['validation'].rows:,} validation rows, "
        f"{ids} ids, span_corruption)"
    )
    added = f"{len(tokenizer.special_tokens)} special tokens and {tokenizer.sentinels} sentinels"
    assert repr(tokenizer) == f"Tokenizer(sentencepiece: {ids} ids, {pieces} of the model, {added})"
    loader = corpus.loader("train", 8, rank=1, ranks=2)
    assert repr(loader) == f"Loader(train of {corpus!r}: 8 rows for rank 1 of 2)"
    model = untrained(corpus)
    parameters = sum(one.numel() for one in model.parameters())
    assert repr(model) == f"PretrainedModel(t5: {parameters:,} parameters, float32 on cpu; {tokenizer!r})"
