"""The hooks `attention`, `positions`, `embedding` and `loss_breakdown`, and the command that draws attention."""

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diagnostics.attention import draw_attention
from diagnostics.attention_maps import attention_patterns, recording_weights
from diagnostics.loss_breakdown import power_of_two, span_lengths
from diagnostics.vectors import embedding

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import open_corpus
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate import record
from pretrain.run.metrics_file import read_metrics
from tests.support.forked import run_forked
from tests.support.runs import run_file, train_ranks
from tests.support.small_evaluations import evaluated
from tests.support.small_models import as_at_the_start, ids
from tests.support.tables import each as table

# Weights are spread over the ranks however small they are: the ranks exchange them in each forward.
SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def test_span_lengths_are_those_of_a_worked_example():
    """Ids below 90 are text; 99 and 98 are the first two sentinels, 1 is EOS."""
    vocabulary = Vocabulary(size=100, text=(3, 90), pad=0, eos=1, unk=2, first_sentinel=99, sentinels=10)
    labels = torch.tensor([[99, 7, 8, 98, 9, 1, -100], [5, 99, 98, 6, 6, 2, 1]])
    assert span_lengths(labels, vocabulary).tolist() == [[0, 2, 2, 0, 1, 0, 0], [0, 0, 0, 3, 3, 3, 0]]
    assert power_of_two(torch.tensor([0, 1, 2, 3, 4, 7, 8])).tolist() == [0, 1, 2, 2, 3, 3, 4]


@torch.no_grad()
def test_weights_recorded_of_a_model_are_of_none_other():
    """Of two models, one inside the block of the other, and nothing after the blocks."""
    models = [as_at_the_start(name) for name in ("t5", "decoder_only")]
    inputs = ids(4, 6)
    with contextlib.ExitStack() as stack:
        weights = [stack.enter_context(recording_weights(model)) for model in models]
        models[1](encoder_input_ids=inputs, labels=inputs)
        assert [len(found) for found in weights] == [0, models[1].config.num_layers]
    models[1](encoder_input_ids=inputs, labels=inputs)
    assert len(weights[1]) == models[1].config.num_layers
    name, found = weights[1][0]
    assert name == "decoder.layers.0.attention"
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(found.shape[:3]))
    assert found.triu(1).abs().max() == 0


@pytest.mark.slow
def test_pictures_of_attention_and_positions_and_metrics_of_the_embedding(small_corpus, tmp_path):
    """At ZeRO-3, then on one rank; drawn by rank 0 alone, in mid-run and at the end. T5 has three kinds of attention
    and two tables of relative biases."""
    hooks = [{"hook": name, "every_steps": 3} for name in ("attention", "positions", "embedding")]
    path = run_file(tmp_path, small_corpus, evaluation=hooks, deepspeed=SHARDED)
    assert train_ranks(path, 2, stop=5) == [75, 75]
    assert train_ranks(path, 1) == [0]
    folder = tmp_path / "run/artifacts/evaluation"
    assert {str(file.parent.relative_to(folder)) for file in folder.rglob("*.png")} == {
        *(f"attention/small/{kind}" for kind in ("encoder", "decoder", "cross")),
        *(f"positions/{stack}.relative_attention_bias" for stack in ("encoder", "decoder")),
    }
    metrics = read_metrics(tmp_path / "run")[-1].metrics
    trained = TrainedModel.open(tmp_path / "run/checkpoints/step-00000008").model
    rows = embedding(trained).detach().numpy()
    values = np.linalg.svd(rows, compute_uv=False)
    shares = values / values.sum()
    assert math.isclose(metrics["embedding/effective_rank"], math.exp(-(shares * np.log(shares)).sum()), rel_tol=1e-4)
    directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = (directions @ directions.T)[~np.eye(len(rows), dtype=bool)]
    assert math.isclose(metrics["embedding/mean_cosine"], cosines.mean(), abs_tol=1e-6)


@table("name, most", [("t5", 6), ("t5gemma2", 9)])
@torch.no_grad()
def test_patterns_are_the_softmax_of_each_layer(small_corpus, name, most):
    """Of a row of 7 tokens with 5 targets. T5Gemma 2's decoder attends to its targets and to the input with one
    softmax, which is drawn in two parts."""
    windows = dict.fromkeys(("sliding_window", "full_attention_every", "window_rope_base")) if most == 9 else {}
    model = as_at_the_start(name, vocab_size=520, **windows)
    row = {"encoder_input_ids": ids(1, 7), "labels": ids(1, 5)}
    found = attention_patterns(model, row, open_corpus(small_corpus).tokenizer, most=most)
    layers, read = len(model.decoder.layers), min(most, 7)
    shapes = {kind: tuple(one.weights.shape) for kind, one in found.items()}
    assert shapes == {"encoder": (layers, 4, read, read), "decoder": (layers, 4, 5, 5), "cross": (layers, 4, 5, read)}
    assert (len(found["cross"].keys), len(found["decoder"].queries)) == (read, 5)
    own, across = found["decoder"].weights, found["cross"].weights
    assert not own.triu(1).any()  # a causal query sees nothing later
    whole = own.sum(dim=-1) + (across.sum(dim=-1) if name == "t5gemma2" else 0)
    assert torch.allclose(whole, torch.ones(layers, 4, 5))


def check_breakdown(folder: Path, whole: dict[str, float]) -> None:
    """Each grouping's tokens and losses add up to those of the same rows: by position to all targets, by frequency to
    all text."""
    rows = record.table(folder / "loss_breakdown.json")
    for by, metric in (("position", "loss"), ("frequency", "text_loss")):
        found = [row for row in rows if row["by"] == by]
        mean = sum(row["tokens"] * row["loss"] for row in found) / sum(row["tokens"] for row in found)
        assert math.isclose(mean, whole[f"validation/small/{metric}"], rel_tol=1e-9)
    hits = sum(row["tokens"] * row["accuracy"] for row in rows if row["by"] == "position")
    targets = sum(row["tokens"] for row in rows if row["by"] == "position")
    assert (targets <= 8 * 34) == (folder.name == "few")  # a whole batch of 8 rows of 34 tokens
    assert math.isclose(hits / targets, whole["validation/small/accuracy"], rel_tol=1e-9)
    assert math.isclose(
        math.log(whole["validation/small/perplexity"]), whole["validation/small/text_loss"], rel_tol=1e-9
    )


def test_a_checkpoint_is_evaluated_as_in_its_run(small_corpus, tmp_path):
    """The loss is broken down over all rows, and over few of them; attention is drawn for a text by the command."""
    hooks = [{"hook": "validation_loss"}, {"hook": "loss_breakdown", "rows": 10_000}, {"hook": "embedding"}]
    path = run_file(tmp_path, small_corpus, evaluation=hooks, run={"max_steps": 2})
    assert train_ranks(path, 2) == [0, 0]
    logged, evaluation = read_metrics(tmp_path / "run")[-1].metrics, tmp_path / "run/artifacts/evaluation"
    check_breakdown(evaluation, logged)
    (picture,) = (evaluation / "loss_breakdown/small").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    few = [f"{{hook: {name}, rows: 5}}" for name in ("validation_loss", "loss_breakdown")]
    checkpoint = checkpoint_in(tmp_path / "run")
    check_breakdown(tmp_path / "few", json.loads(evaluated(checkpoint, (), few, tmp_path / "few")))
    again = json.loads(evaluated(checkpoint, (), ["embedding"], tmp_path / "again"))
    wanted = {name: value for name, value in logged.items() if name.startswith("embedding/")}
    assert {name: again[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    text = ["See <extra_id_0> there.", "--out", tmp_path / "a", "--target", "it"]
    drawn = run_forked("attention", tmp_path / "run", *text)
    kinds = ("encoder", "decoder", "cross")
    assert drawn.stdout.split() == [str(tmp_path / f"a/{kind}.png") for kind in kinds], drawn.stderr
    assert all((tmp_path / f"a/{kind}.png").read_bytes().startswith(b"\x89PNG") for kind in kinds)


def test_a_model_that_reads_one_text_has_no_target(small_corpus, tmp_path):
    trained = TrainedModel(as_at_the_start("decoder_only", vocab_size=520), open_corpus(small_corpus).tokenizer)
    with pytest.raises(UserError, match=r"^--target: models of the family decoder_only read one text$"):
        draw_attention(trained, "See there.", "it", 8, tmp_path)


@table("name, text, target, message", [
    ("bart", "See there.", "it " * 70, r"^the target: has \d+ tokens, but the model takes 64 at most$"),
    ("decoder_only", "it " * 70, None, r"^TEXT: has \d+ tokens, but the model takes 64 at most$"),
])  # fmt: skip
def test_a_text_longer_than_the_models_positions_is_refused(small_corpus, tmp_path, name, text, target, message):
    trained = TrainedModel(as_at_the_start(name, vocab_size=520), open_corpus(small_corpus).tokenizer)
    with pytest.raises(UserError, match=message):
        draw_attention(trained, text, target, 8, tmp_path)
