"""The likelihood of the second half of a text after its first half, in the form of each family's training."""

import math

import pytest

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.blocks import rows_in
from data_pipeline.foundation.config_file import check
from data_pipeline.loading.store import BlockStore
from pretrain.config.evaluation import ContinuationSettings
from pretrain.evaluation.continuation import Continuation
from pretrain.run.metrics_file import read_metrics
from tests.pretrain.runs import run_file, train_ranks
from tests.pretrain.small_evaluations import CAUSAL, T5, evaluation_of, log_p, log_p_after
from tests.tables import each

ROWS = 10


def held_out_texts(corpus, number):
    store = BlockStore(corpus, "validation", 4)
    inside = [(block, row) for block in range(len(store.index.rows)) for row in range(store.index.rows[block])][:number]
    rows = rows_in([store[block] for block, _ in inside], [row for _, row in inside])
    return [row[:length].tolist() for row, length in zip(rows.values, rows.lengths, strict=True)]


def continued(model, context, text, form, vocabulary):
    if form is None:
        return log_p_after(model, context, text)
    blank = [vocabulary.first_sentinel] if form == "blank" else []
    return log_p(model, [*context, *blank, vocabulary.eos], blank, text)[0]


@each("settings, form", [(T5, "answer"), (T5, "blank"), (CAUSAL, None)])
def test_it_is_the_sum_of_the_models_log_probabilities(small_corpus, settings, form):
    corpus = open_corpus(small_corpus)
    vocabulary = corpus.tokenizer.vocabulary
    model, evaluation = evaluation_of(settings, corpus.tokenizer, {"small": corpus})
    hook = Continuation(check({"rows": ROWS, "form": form}, ContinuationSettings, "hook"))
    found = hook.evaluate(evaluation).metrics
    texts = [text for text in held_out_texts(corpus, ROWS) if len(text) > 2]
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    others = [*halves[len(halves) // 2 :], *halves[: len(halves) // 2]]
    loss, other = (
        -sum(
            continued(model, context, text, form, vocabulary)
            for (context, _), (_, text) in zip(by, halves, strict=True)
        )
        for by in (halves, others)
    )
    tokens = sum(len(text) for _, text in halves)
    size = sum(len(corpus.tokenizer.decode(text).encode()) for _, text in halves)
    assert found["continuation/small/loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert found["continuation/small/other_context_loss"] == pytest.approx(other / tokens, rel=1e-5)
    assert found["continuation/small/bits_per_byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    thirds = [(one[: len(one) // 3], one[len(one) // 3 : 2 * len(one) // 3], one[2 * len(one) // 3 :]) for one in texts]
    if form == "answer":
        assert not [name for name in found if name.startswith("infilling")]
        return
    loss = -sum(infilled(model, *parts, form, vocabulary) for parts in thirds)
    tokens = sum(len(middle) for _, middle, _ in thirds)
    assert found["infilling/small/loss"] == pytest.approx(loss / tokens, rel=1e-5)
    assert found["infilling/small/other_context_loss"] != found["infilling/small/loss"]
    hook = Continuation(check({"rows": ROWS, "form": form, "infilling_length": 2}, ContinuationSettings, "hook"))
    starts = [(len(one) - 2) // 2 if len(one) > 4 else len(one) // 3 for one in texts]
    sizes = [min(2, 2 * len(one) // 3 - len(one) // 3) for one in texts]
    parts = [
        (one[:start], one[start : start + size], one[start + size :])
        for one, start, size in zip(texts, starts, sizes, strict=True)
    ]
    loss = -sum(infilled(model, *three, form, vocabulary) for three in parts)
    shorter = hook.evaluate(evaluation).metrics
    assert shorter["infilling/small/loss"] == pytest.approx(loss / sum(sizes), rel=1e-5)


def infilled(model, before, middle, after, form, vocabulary):
    first, second, third = (vocabulary.first_sentinel - number for number in range(3))
    if form is None:
        return log_p_after(model, [first, *before, second, *after, third], middle)
    return log_p(model, [*before, first, *after, vocabulary.eos], [first], middle)[0]


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
