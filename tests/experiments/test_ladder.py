"""Ladders: the law and its interval, the length of rungs, refusals, and a real ladder of a few steps."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import PYTHON
from experiments.ladder import ladder_file, rungs
from experiments.ladder.compared import Other
from experiments.ladder.ladder_report import Report
from experiments.ladder.run_ladder import ladder
from experiments.ladder.scaling_law import fit
from pretrain.config import RunConfig
from pretrain.models import meta_model
from pretrain.models.flops import Sizes, count_flops
from pretrain.run.metrics_file import read_metrics
from pretrain.tools.experiment import run_experiment
from pretrain.tools.experiment.results import Result
from tests.support.forked import Forked
from tests.support.runs import MODEL, run_file
from tests.support.tables import each

SHIPPED = Path(__file__).parents[2] / "experiments/ladder/t5-wikipedia-c4.yaml"
COMPUTE = 1e12 * 4.0 ** np.arange(6)


# The law.


@each("E, A, alpha", [(1.69, 406.4, 0.34), (2.5, 2000.0, 0.25), (0.8, 30.0, 0.1)])
def test_a_fit_without_noise_finds_the_constants(E, A, alpha):
    law = fit(COMPUTE[:5], E + A * COMPUTE[:5] ** -alpha)
    assert (law.E, law.A, law.alpha) == pytest.approx((E, A, alpha), rel=1e-3)
    assert law(COMPUTE[5]) == pytest.approx(E + A * COMPUTE[5] ** -alpha, rel=1e-6)
    assert not law.bounded


@each("rungs", [4, 5])
def test_the_interval_holds_the_next_rung_as_often_as_it_says(rungs):
    draws = np.random.default_rng(0)
    inside, widths = 0, []
    for _ in range(80):
        losses = 1.7 + 2000 * COMPUTE**-0.25 + 0.01 * draws.standard_normal(6)
        low, high = fit(COMPUTE[:rungs], losses[:rungs]).interval(COMPUTE[rungs])
        inside += low <= losses[rungs] <= high
        widths.append(high - low)
    assert 0.9 <= inside / 80 <= 1.0  # 95 % ± two standard deviations of 80 draws
    # One degree of freedom costs: 12.7 against 4.3 standard deviations. An interval that is always wide says nothing.
    assert np.median(widths) < {4: 0.8, 5: 0.15}[rungs]


def test_losses_that_do_not_bend_say_so():
    law = fit(COMPUTE[:5], 30 * COMPUTE[:5] ** -0.1 - 0.3)
    assert law.E < 1e-6
    assert law.bounded


# Files.


def written(tmp_path, corpus, rungs=None, following=None, **changes):
    """A ladder of widths 8, 16, 24 and 32, next 40; `rungs` gives other widths, and a d_model that isn't its name's."""
    run_file(tmp_path, corpus, model={**MODEL, "dropout_rate": 0.0})

    def rung(width, d_model=None):
        return {"name": f"w{width}", "overrides": [f"model.d_model={d_model or width}", "model.num_heads=2"]}

    content = {
        "run": "run.yaml",
        "tokens_per_parameter": 0.05,
        "rungs": [rung(*one) for one in (rungs or [(8,), (16,), (24,), (32,)])],
        "next": rung(*(following or (40,))),
        **changes,
    }
    path = tmp_path / "ladder.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@each(
    "changes, said",
    [
        ({"rungs": [(8,), (16,), (24,)]}, r"ladder\.yaml: rungs: 3 given; .* at least 4$"),
        ({"rungs": [(8,), (16,), (16,), (24,)]}, r"rungs: two are named 'w16'$"),
        ({"next": None}, r"next: expected"),
        ({"run": "other.yaml"}, r"other\.yaml: no such file$"),
        ({"run": "ladder.yaml"}, r"run: ladder\.yaml isn't a run file$"),
        ({"tokens_per_parameters": 3}, r"unknown key; nearest valid key: tokens_per_parameter$"),
        (None, r"run\.yaml: is a run file; expected a ladder file, with run, rungs and next$"),
    ],
)
def test_a_wrong_ladder_file_is_refused_in_a_line(tmp_path, changes, said):
    path = written(tmp_path, tmp_path / "corpus", **(changes or {}))
    with pytest.raises(UserError, match=said) as caught:
        ladder_file.read(path if changes is not None else tmp_path / "run.yaml")
    assert len(str(caught.value).splitlines()) == 1


SAME = [(8,), (16,), (24, 16), (32,)]  # of the name w24, as wide as w16
BART = {key: MODEL[key] for key in MODEL if key != "d_kv"} | {"family": "bart"}


@each(
    "changes, model, corpus, said",
    [
        ({"rungs": SAME}, MODEL, "", r"ladder\.yaml: w16 and w24 have [\d,]+ parameters each; a rung is a size$"),
        ({"rungs": [(8,), (16,), (27,), (32,)]}, BART, "", r"rungs\.2 \(w27\): .*: 2 doesn't divide d_model 27$"),
        ({}, MODEL, "no corpus", r"rungs\.0 \(w8\), .*, next \(w40\): .*no corpus"),  # said once for all rungs
        ({"following": (12,)}, MODEL, "", r"next \(w12\): smaller than w32; the next rung is the largest$"),
    ],
)
def test_rungs_that_cannot_be_run_are_refused_in_a_line(changes, model, corpus, said, small_corpus, tmp_path):
    path = written(tmp_path, tmp_path / corpus if corpus else small_corpus, **changes)
    if model is not MODEL:
        run_file(tmp_path, small_corpus, model=model)
    with pytest.raises(UserError, match=said) as caught:
        rungs.sized(path, *ladder_file.read(path), [])
    assert len(str(caught.value).splitlines()) == 1


# Lengths.


def test_steps_follow_from_tokens_and_warm_up_with_them(small_corpus, tmp_path):
    path = written(tmp_path, small_corpus, tokens_per_parameter=3)
    found = rungs.sized(path, *ladder_file.read(path), [])
    assert [rung.name for rung in found.all] == ["w8", "w16", "w24", "w32", "w40"]
    splits = json.loads((small_corpus / "manifest.json").read_text())["splits"]["train"]
    per_row = splits["tokens"] / splits["rows"]
    for rung in found.all:
        config = load(found.run, rung.overrides, RunConfig)
        model = meta_model(config.model.model_copy(update={"vocab_size": 520}))
        assert rung.parameters == model.num_parameters()
        assert abs(rung.tokens - 3 * rung.parameters) <= 16 * per_row / 2  # half a step
        assert rung.tokens == rung.steps * 16 * per_row
        assert config.run.max_steps == rung.steps
        assert config.schedule.warmup_steps == round(rung.steps * 3 / 8)  # 3 of 8 in the run file
        # 34 tokens: 5 of them in 2 spans give 31 inputs with an EOS token and 8 targets
        whole = rung.steps * 16 * count_flops(model, Sizes.of_example(32, 8))
        assert rung.flops == pytest.approx(whole, rel=0.05)


def test_the_shipped_ladder_grows_by_a_half_to_the_double():
    shipped, run = ladder_file.read(SHIPPED)
    counts = []
    for rung in shipped.all:
        config = load(run, rung.overrides, RunConfig)
        counts.append(meta_model(config.model.model_copy(update={"vocab_size": 1100})).num_parameters())
    ratios = [more / less for less, more in itertools.pairwise(counts)]
    assert all(1.45 <= ratio <= 2 for ratio in ratios), ratios


# What is reported.


def other_ladder(folder, losses):
    """With rungs of `COMPUTE` that reached `losses`."""
    rungs = [{"flops": flops, "losses": {"0": loss}} for flops, loss in zip(COMPUTE, losses, strict=True)]
    write_json(folder / "ladder.json", {"name": "slow", "rungs": rungs[:-1], "next": rungs[-1]})
    return Other.read(folder / "ladder.json")


@each("bottom", [0.0, 1.5])
def test_compute_for_equal_losses_is_that_of_the_other_ladders_law(tmp_path, bottom):
    """One law is the other at a quarter of the compute; below its limit no compute is enough."""
    losses = bottom + 2000 * COMPUTE**-0.25
    other = other_ladder(tmp_path, losses)
    for flops, loss in zip(COMPUTE / 4, losses, strict=True):
        best, least, most = other.factor(flops, loss)
        assert best == pytest.approx(4, rel=0.02)
        assert least <= best <= most
    assert other.factor(COMPUTE[0], bottom - 0.01)[0] == float("inf")
    scattered = np.random.default_rng(0).normal(0, 0.002 * (losses[0] - losses[-1]), 6)
    other = other_ladder(tmp_path, losses + scattered)
    best, least, most = other.factor(COMPUTE[2], losses[3])
    assert 2 < least < best < most < 8  # however wide the interval is far from the rungs
    heading, fast = other.words([("fast", COMPUTE[0] / 4, losses[0])])
    assert heading.endswith(f"(degrees of freedom: {len(COMPUTE) - 3}):")
    assert fast.startswith("  fast, ")


def test_what_is_no_finished_ladder_is_refused_in_a_line(tmp_path):
    path = tmp_path / "ladder.json"
    with pytest.raises(UserError, match="no such file"):
        Other.read(path)
    write_json(path, {"name": "slow", "rungs": [{"flops": 1.0, "losses": {"0": 3.0}}], "next": {"losses": {}}})
    with pytest.raises(UserError, match=r"not the ladder\.json of a finished"):
        Other.read(path)


def made(rung, seed, loss):
    return Result(rung, seed, 10, 100, None, loss)


def test_the_report_has_the_law_the_prediction_and_what_was_reached(small_corpus, tmp_path):
    path = written(tmp_path, small_corpus, fit_over="parameters")
    found = rungs.sized(path, *ladder_file.read(path), [])
    sizes = [rung.parameters for rung in found.all]
    true = [2 + 50 * size**-0.5 for size in sizes]
    results = [
        made(rung.name, seed, loss + (0.01 if seed else -0.01))
        for rung, loss in zip(found.rungs, true, strict=False)
        for seed in (0, 1)
    ]
    report = Report.of(found, results)
    assert report.prediction.loss == pytest.approx(true[-1], abs=1e-4)
    assert report.prediction.reached is None
    reached = Report.of(found, [*results, made(found.next.name, 0, true[-1])])
    assert reached.prediction.reached.mean == true[-1]
    assert "Reached" in reached.text()
    assert max(map(len, reached.text().splitlines())) <= 120
    write_json(tmp_path / "ladder.json", reached.as_json())
    content = json.loads((tmp_path / "ladder.json").read_text())
    assert content["law"]["alpha"] == pytest.approx(0.5, abs=0.01)
    assert content["prediction"]["reached"]["mean"] == true[-1]
    assert content["rungs"][0]["losses"] == {"0": true[0] - 0.01, "1": true[0] + 0.01}
    axes = reached.picture().axes[0]
    assert sum(len(line.get_xdata()) == 100 for line in axes.lines) == 1
    floor = axes.get_ylim()[0]
    assert true[-1] - 1 < floor < true[-1]
    assert axes.get_ylabel() == f"validation loss, nats per token; axis from {floor:.1f}"
    assert len(axes.containers) == 1  # the prediction
    straight = [made(rung.name, 0, 30 * rung.parameters**-0.1 - 0.3) for rung in found.rungs]
    undetermined = Report.of(found, straight)
    assert undetermined.law.bounded
    assert not undetermined.picture().axes[0].containers
    unfinished = Report.of(found, results[:-2])
    assert unfinished.law is None
    assert f"No law yet: {found.rungs[-1].name} without a validation loss." in unfinished.text()
    other = Other("other", (1e10, 1e11), (3.0, 2.0), report.law)
    begun = Report.of(found, [], other).picture().axes[0]
    assert [line.get_label() for line in begun.lines[-1:]] == ["law of other"]


# Runs.


@pytest.mark.slow
def test_a_ladder_from_runs_to_prediction(small_corpus, tmp_path, monkeypatch, capsys):
    path, out = written(tmp_path, small_corpus), tmp_path / "out"
    started = []

    def start(group, run, changes):
        started.append(run.name)
        return group.add(Forked("train", *run.launcher[len(PYTHON) + 4 :]))

    monkeypatch.setattr(run_experiment, "start", start)
    assert ladder(path, 1, 2, out, [], train_next=True) == 0
    assert started == [f"w{width}-seed-0" for width in (8, 16, 24, 32, 40)]
    losses = {
        width: read_metrics(out / f"w{width}/seed-0")[-1].metrics["validation/small/loss"]
        for width in (8, 16, 24, 32, 40)
    }
    content = json.loads((out / "ladder.json").read_text())
    assert content["prediction"]["reached"]["mean"] == losses[40]
    flops = [rung["flops"] for rung in content["rungs"]]
    law = fit(flops, [losses[width] for width in (8, 16, 24, 32)])
    assert content["prediction"]["loss"] == law(content["next"]["flops"])
    assert (out / "ladder.png").exists()
    assert "Predicted for w40" in (out / "ladder.md").read_text()

    started.clear()
    assert ladder(path, 1, 2, out, []) == 0  # nothing is left
    assert not started
    assert "4 rungs × 1 seed, 4 of 4 runs finished" in capsys.readouterr().out
    longer = written(tmp_path, small_corpus, tokens_per_parameter=0.1)
    with pytest.raises(UserError, match=r"has runs of w8, .* with other settings or steps; give the same"):
        ladder(longer, 1, 2, out, [])
