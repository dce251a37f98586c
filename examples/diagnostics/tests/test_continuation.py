"""The likelihood of the second half of a text after its first half, in the form of each family's training."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diagnostics.continuation import Continuation
from diagnostics.settings import ContinuationSettings

from data_pipeline.base.config_file import check
from data_pipeline.corpus import open_corpus
from data_pipeline.loading.reader import Reader
from pretrain.evaluate.hook import Collectives
from pretrain.run.metrics_file import read_metrics
from tests.support.runs import run_file, train_ranks
from tests.support.small_evaluations import CAUSAL, T5, evaluation_of, log_p, log_p_after
from tests.support.tables import each

ROWS = 10


def held_out_texts(corpus, number):
    rows = Reader(corpus, "validation").tokens(np.arange(number))
    return [row[:length].tolist() for row, length in zip(rows.values, rows.lengths, strict=True)]


def scored(model, before, text, after, form, vocabulary):
    """log p of `text` between two parts, the second of which may be empty."""
    first, second, third = (vocabulary.first_sentinel - number for number in range(3))
    if form is None:
        return log_p_after(model, [first, *before, second, *after, third] if after else before, text)
    blank = [first] if form == "blank" else []
    return log_p(model, [*before, *blank, *after, vocabulary.eos], blank, text)[0]


def cut(text, start, end):
    return text[:start], text[start:end], text[end:]


@each("settings, form", [(T5, "answer"), (T5, "blank"), (CAUSAL, None)])
def test_it_is_the_sum_of_the_models_log_probabilities(small_corpus, settings, form):
    corpus = open_corpus(small_corpus)
    model, evaluation = evaluation_of(settings, corpus.tokenizer, {"small": corpus})
    texts = [text for text in held_out_texts(corpus, ROWS) if len(text) > 2]
    assert min(map(len, texts)) > 5  # of which a third holds 2 tokens
    tasks = {
        "continuation": (None, [cut(one, len(one) // 2, len(one)) for one in texts]),
        "infilling": (None, [cut(one, len(one) // 3, 2 * len(one) // 3) for one in texts]),
        "infilling of 2": (2, [cut(one, (len(one) - 2) // 2, (len(one) + 2) // 2) for one in texts]),
    }
    for task, (length, parts) in tasks.items():
        given = {"rows": ROWS, "form": form, "infilling_length": length}
        found = Continuation(check(given, ContinuationSettings, "hook")).evaluate(evaluation).metrics
        name = f"{task.split()[0]}/small"
        if form == "answer" and task != "continuation":
            assert f"{name}/loss" not in found
            continue
        others = [*parts[len(parts) // 2 :], *parts[: len(parts) // 2]]
        loss, other = (
            -sum(
                scored(model, before, text, after, form, corpus.tokenizer.vocabulary)
                for (before, _, after), (_, text, _) in zip(contexts, parts, strict=True)
            )
            for contexts in (parts, others)
        )
        tokens = sum(len(text) for _, text, _ in parts)
        size = sum(len(corpus.tokenizer.decode(text).encode()) for _, text, _ in parts)
        assert found[f"{name}/loss"] == pytest.approx(loss / tokens, rel=1e-5)
        assert found[f"{name}/other_context_loss"] == pytest.approx(other / tokens, rel=1e-5)
        assert found[f"{name}/bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)


def test_a_spent_budget_leaves_out_what_follows(small_corpus):
    corpus = open_corpus(small_corpus)
    _, evaluation = evaluation_of(T5, corpus.tokenizer, {"small": corpus, "other": corpus})
    assert ContinuationSettings().budget_seconds is None
    hook = Continuation(ContinuationSettings(rows=2, form="blank"))
    tasks = [f"{task}/{name}" for name in ("small", "other") for task in ("continuation", "infilling")]
    assert [*dict.fromkeys(name.rpartition("/")[0] for name in hook.evaluate(evaluation).metrics)] == tasks
    spent = replace(evaluation, collectives=Collectives(1e-9, torch.device("cpu"), alone=True))
    assert {name.rpartition("/")[0] for name in hook.evaluate(spent).metrics} == {tasks[0]}


def test_one_row_has_no_other_context(small_corpus):
    corpus = open_corpus(small_corpus)
    _, evaluation = evaluation_of(T5, corpus.tokenizer, {"small": corpus})
    found = Continuation(ContinuationSettings(rows=1, form="answer")).evaluate(evaluation)
    assert found.metrics.keys() == {"continuation/small/loss", "continuation/small/bits_per_byte"}
    assert found.lines[0].endswith("nats a token")


@pytest.mark.slow
def test_ranks_of_zero_3_score_their_shares_in_mid_run(small_corpus, tmp_path):
    """Of three batches, rank 0 has two and rank 1 one."""
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    hooks = [{"hook": "continuation", "every_steps": 2, "rows": 6}]
    found = []
    for ranks in (1, 2):
        path = run_file(tmp_path / str(ranks), small_corpus, deepspeed=sharded, evaluation=hooks, run={"max_steps": 5})
        assert train_ranks(path, ranks) == [0] * ranks
        rows = {row.step: row.metrics for row in read_metrics(tmp_path / str(ranks) / "run")}
        found.append([rows[step]["continuation/small/loss"] for step in (2, 4, 5)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
