"""`pretrain experiment`: budgets, the runs of a folder, statistics over seeds, and the table."""

import csv
import math
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml
from omegaconf import OmegaConf

import pretrain
from data_pipeline.base.config_file import check, load
from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import PYTHON
from docs.site import experiments_reference
from pretrain.config import RunConfig
from pretrain.models import meta_model
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import status
from pretrain.run.metrics_file import MetricLog, read_metrics
from pretrain.run.status import Status
from pretrain.run.world import World
from pretrain.tools.experiment import experiment_folder, report, results, run_experiment
from pretrain.tools.experiment.experiment_folder import PlannedRun, plan_experiment, shortened
from pretrain.tools.experiment.results import Comparison, Result, compare, holm, read_csv
from pretrain.tools.experiment.run_experiment import experiment
from pretrain.training.prepare import prepare
from tests.conftest import TOP
from tests.support.forked import Forked
from tests.support.runs import MODEL, mlflow, run_file
from tests.support.small_runs import run_config
from tests.support.tables import each

CONFIGS = Path(__file__).parents[3] / "configs/experiments"
PUBLISHED = CONFIGS / "autoregressive"


def test_the_page_of_keys_is_what_the_code_says():
    assert (TOP / "docs/reference/experiments.md").read_text() == experiments_reference.page(), (
        "out of date: python -m docs.site.experiments_reference > docs/reference/experiments.md"
    )


# Statistics, compared with scipy's.


@each(
    "row, baseline",
    [
        ([3.0, 3.2, 3.1], [3.1, 3.3, 3.4]),
        ([5.0, 5.1], [4.0, 4.2]),
        ([1.0, 2.0, 3.0, 4.5, 5.0], [1.5, 1.0, 3.5, 4.0, 4]),
    ],
)
def test_a_comparison_is_the_paired_t_test_of_common_seeds(row, baseline):
    found = compared({**dict(enumerate(row)), 9: 100.0}, {7: -100.0, **dict(enumerate(baseline))})
    expected = scipy.stats.ttest_rel(row, baseline)
    assert found.degrees_of_freedom == expected.df == len(row) - 1
    assert (found.difference / found.error, found.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.difference == pytest.approx(np.mean(row) - np.mean(baseline))


def compared(row, baseline):
    return compare({"row": row, "baseline": baseline}, "baseline").get("row")


def test_few_seeds_and_equal_differences_have_no_scatter():
    assert compared({1: 2.0}, {2: 2.0}) is None
    alone = compared({1: 2.0}, {1: 1.5})
    assert (alone.difference, alone.p) == (pytest.approx(0.5), None)
    assert compared({1: 2.0, 2: 2.0}, {1: 2.0, 2: 2.0}).p == 1.0
    assert compared({1: 3.0, 2: 3.0}, {1: 2.0, 2: 2.0}).p == 0.0


def test_the_scatter_of_all_rows_is_pooled():
    """By hand: residuals of the values without the means of their rows and seeds."""
    random = np.random.default_rng(0)
    values = random.normal(size=(5, 3)) + random.normal(size=3) * 10
    rows = {f"row-{number}": dict(enumerate(row)) for number, row in enumerate(values.tolist())}
    found = compare(rows, "row-0")["row-3"]
    residuals = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    error = math.sqrt((residuals**2).sum() / 8 * 2 / 3)
    difference = values[3].mean() - values[0].mean()
    assert found == Comparison(pytest.approx(difference), pytest.approx(error), 8)
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(abs(difference / error), 8))


def test_p_values_are_adjusted_for_being_one_of_several():
    """Those of Holm's step-down method, as R's p.adjust gives them."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


# Budgets.


def test_a_budget_shortens_every_number_of_steps_in_proportion():
    file = PUBLISHED / "mse.yaml"
    whole = load(file, [], RunConfig)
    short = load(file, shortened(whole, "900steps"), RunConfig)
    assert (short.run.max_steps, short.schedule.warmup_steps, short.schedule.until_step) == (900, 30, 70_000)
    assert [hook.every_steps for hook in short.evaluation] == [50, 100]
    assert (short.checkpoint.every_steps, short.tracking.log_every_steps) == (100, 5)
    for step in (8, 30, 449, 899):  # the same rate at the same share of the run
        peak = whole.optimizer.learning_rate
        same = whole.schedule.factor(10 * step + 9, whole.run.max_steps, peak)
        assert short.schedule.factor(step, 900, peak) == pytest.approx(same, rel=1e-6)
    changed = {"run", "schedule", "evaluation", "checkpoint", "tracking"}
    assert short.model_dump(exclude=changed) == whole.model_dump(exclude=changed)
    assert shortened(whole, "10%") == shortened(whole, "900steps")
    assert load(file, shortened(whole, "1step"), RunConfig).run.max_steps == 1


LONG_SPANS = {"name": "span_corruption", "inputs_length": 22, "noise_density": 0.5, "mean_span_length": 5.0}
STAGES = [{"until_step": step, "objective": LONG_SPANS} for step in (3, 4, 50)]
RAMP = [{"until_step": step, "global_batch_size": size} for step, size in ((3, 2), (4, 4), (50, 6))]
WITH_EVERY_STEP = {
    "optimizer": {"learning_rate": 1e-3, "freeze": {"match": ["*"], "until_step": 70}},
    "batch": {"global_batch_size": 8, "ramp_up": RAMP},
    "data": {"train": [{"corpus": "none"}], "validation": [{"corpus": "none"}], "curriculum": STAGES},
    "evaluation": [{"hook": "samples", "every_steps": 20}],
    "checkpoint": {"every_steps": 35, "keep_every_steps": 70},
    "tracking": {"log_every_steps": 4},
}
OF_NO_LENGTH = {  # of the page of settings: counts, and what follows from the time that something takes
    "faults.max_skipped_steps",
    "optimizer.ns_steps",
}


def short_of(steps, schedule, **sections):
    """What a budget of `steps` makes of a run of 100, as the values of overrides, which give a valid run."""
    config = run_config(schedule=schedule, **sections)
    overrides = shortened(config, f"{steps}steps")
    shorter = OmegaConf.create(config.model_dump(mode="json", exclude_unset=True))
    shorter.merge_with_dotlist(overrides)
    check(OmegaConf.to_container(shorter), RunConfig, "run.yaml")
    return {key: int(value) for key, value in (one.split("=") for one in overrides)}


def test_a_budget_changes_each_number_of_steps_and_leaves_them_in_their_order():
    decay = {"name": "warmup_stable_decay", "warmup_steps": 5, "decay_steps": 95}
    found = short_of(10, decay, **WITH_EVERY_STEP)
    for key in ("batch.ramp_up", "data.curriculum"):  # of 0.3, 0.4 and 5
        assert [found[f"{key}.{number}.until_step"] for number in range(3)] == [1, 2, 5]
    assert (found["optimizer.freeze.until_step"], found["evaluation.0.every_steps"]) == (7, 2)
    assert (found["checkpoint.every_steps"], found["checkpoint.keep_every_steps"]) == (4, 8)  # of 3.5, and twice that
    until = short_of(10, {"name": "linear", "warmup_steps": 3, "until_step": 4})
    assert (until["schedule.warmup_steps"], until["schedule.until_step"]) == (1, 2)
    page = (TOP / "docs/reference/settings.md").read_text().partition("# Run files")[2]
    counted = set(re.findall(r"^\| `([\w.]+_steps?)` ", page, re.MULTILINE)) | {"schedule.decay_steps"}
    assert {re.sub(r"\.\d\.", ".0.", key) for key in (*found, *until)} == counted - OF_NO_LENGTH


@each("steps, warmup, decay", [(30, 2, 28), (10, 1, 9), (50, 2, 48), (1, 0, 1), (99, 5, 94)])
def test_a_decay_fills_the_run_after_the_warm_up_at_any_length(steps, warmup, decay):
    """Of 5 and 95 steps of 100; of 10, both would be rounded up, to 1 and 10."""
    found = short_of(steps, {"name": "warmup_stable_decay", "warmup_steps": 5, "decay_steps": 95})
    assert (found["schedule.warmup_steps"], found["schedule.decay_steps"]) == (warmup, decay)


@each("text", ["400", "0steps", "-3steps", "0%", "101%", "2h", "steps", "0flops", "flops"])
def test_an_impossible_budget_is_refused(text):
    with pytest.raises(UserError, match="--budget"):
        shortened(load(PUBLISHED / "mse.yaml", [], RunConfig), text)


def test_a_budget_of_flops_gives_each_model_its_steps(small_corpus, tmp_path):
    """Also where the rows of the first steps are shorter, and where weights come from a run that isn't there yet."""
    long_spans = {"name": "span_corruption", "inputs_length": 22, "noise_density": 0.5, "mean_span_length": 5.0}
    data = {"train": [{"corpus": str(small_corpus)}], "validation": [], "lanes": 8, "workers": 0}
    data["curriculum"] = [{"until_step": 4, "objective": long_spans}]
    files = {
        "narrow": run_file(tmp_path / "narrow", small_corpus),
        "wide": run_file(tmp_path / "wide", small_corpus, model={**MODEL, "d_ff": 256}),
        "long spans": run_file(tmp_path / "spans", small_corpus, data=data, evaluation=[]),
        "adapted": run_file(tmp_path / "adapted", small_corpus, checkpoint={"init_from": "runs/not-there-yet"}),
    }
    steps = {}
    for name, file in files.items():
        config = load(file, [], RunConfig)
        steps[name] = load(file, shortened(config, "2e10 FLOPs"), RunConfig).run.max_steps
    setup = prepare(load(files["narrow"], [], RunConfig), World.on_this_node())
    inputs, targets = setup.lengths
    pairs = (inputs**2, targets**2, inputs * targets)
    of_step = count_flops(meta_model(setup.model), Sizes(*(16 * number for number in (inputs, targets, *pairs))))
    assert steps["narrow"] == round(2e10 / of_step) == steps["adapted"]
    assert steps["wide"] < steps["narrow"]
    assert steps["long spans"] != steps["narrow"]
    with pytest.raises(UserError, match="50 at least"):
        shortened(load(files["wide"], [], RunConfig), "1e8flops")


# Folders.


@each("name, rows", [("autoregressive", 15), ("autoregressive-small", 15), ("autoregressive-options", 23)])
def test_every_shipped_row_is_a_run(name, rows):
    found = experiment_folder.read(CONFIGS / name)
    assert len(found.rows) == rows
    assert {row for group in found.groups for row in group.rows} == found.rows.keys()
    for path in found.rows.values():
        load(path, [], RunConfig)


def test_rows_without_groups_are_compared_with_the_first(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.yaml").write_text("run: {}")
    found = experiment_folder.read(tmp_path)
    assert (found.name, list(found.rows)) == (tmp_path.name, ["a", "b", "c"])
    assert found.groups == [experiment_folder.Group(title=tmp_path.name, baseline="a", rows=["a", "b", "c"])]
    (tmp_path / "baseline.yaml").write_text("run: {}")
    (named,) = experiment_folder.read(tmp_path).groups
    assert (named.baseline, named.rows) == ("baseline", ["baseline", "a", "b", "c"])
    (tmp_path / "baseline.yaml").unlink()
    (tmp_path / "experiment.yaml").write_text("groups: [{title: t, baseline: c, rows: [c, b]}]")
    assert list(experiment_folder.read(tmp_path).rows) == ["c", "b", "a"]


@each(
    "rows, text, said",
    [
        (
            ["a", "plain"],
            "groups: [{title: t, baseline: a, rows: [a, plian]}]",
            r"experiment\.yaml: plian\.yaml isn't in the folder",
        ),
        (["a"], "groups: [{title: t, baseline: b, rows: [a]}]", r"groups\.0: baseline: b is none of the rows a"),
        (["a"], "group: []", r"group: unknown key; nearest valid key: groups"),
        (["a"], "name: a b", r"'a b': expected letters"),
        ([], None, "no run file"),
        (None, None, "no such folder"),
    ],
)
def test_a_folder_that_is_no_experiment_is_refused(tmp_path, rows, text, said):
    for name in rows or []:
        (tmp_path / f"{name}.yaml").write_text("run: {}")
    if text:
        (tmp_path / "experiment.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        experiment_folder.read(tmp_path if rows is not None else tmp_path / "none")


# The table


def made_up(row, seed, loss):
    return Result(row, seed, 200, 15_763_500, loss - 0.1, loss)


RESULTS = [made_up("plain", seed, loss) for seed, loss in ((1, 3.40), (2, 3.42), (3, 3.41))]
RESULTS += [made_up("mse", seed, loss) for seed, loss in ((1, 3.38), (2, 3.39), (3, 3.40))]


def test_the_table_has_means_spreads_and_p_values():
    lines = report.lines(experiment_folder.read(PUBLISHED), RESULTS)
    text = report.text(lines)
    assert max(map(len, text.splitlines())) <= 80
    heading, first, *_ = text.split("\n\n")
    assert heading.split() == ["row", "params", "train", "validation", "Δ", "p"]
    rows = [line.split() for line in first.splitlines()]
    # differences −0.02, −0.03, −0.01: t = −2√3 with 2 degrees of freedom
    p = f"{scipy.stats.ttest_1samp([-0.02, -0.03, -0.01], 0).pvalue:.3f}"
    at = rows.index(["mse", "15,763,500", "3.290±0.010", "3.390±0.010", "-0.020", p])
    assert rows[at + 1] == ["plain*", "15,763,500", "3.310±0.010", "3.410±0.010"]
    assert ["subtracted(0)"] in rows  # no run of it has finished


def test_a_group_may_compare_rows_by_another_metric(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("run: {}")
    groups = "[{title: one, baseline: a, rows: [a, b]}, {title: two, baseline: a, rows: [a, b], metric: infilling/x}]"
    (tmp_path / "experiment.yaml").write_text(f"groups: {groups}")
    found = experiment_folder.read(tmp_path)
    made = [
        replace(made_up(row, seed, 3.0), others={"infilling/x": value + seed / 100})
        for row, value in (("a", 2.0), ("b", 1.5))
        for seed in (1, 2)
    ]
    lines = report.lines(found, made)
    assert [line.comparison.difference for line in lines if line.comparison] == pytest.approx([0.0, -0.5])
    assert lines[3].compared.mean == pytest.approx(1.515)
    text = report.text(lines)
    assert "two, infilling/x in place of the validation loss" in text
    assert "1.515±0.007" in text
    rows = list(csv.DictReader(results.as_csv(made).splitlines()))
    assert [float(row["infilling/x"]) for row in rows] == pytest.approx([2.01, 2.02, 1.51, 1.52])


def test_a_run_without_its_checkpoints_stays_in_the_table(tmp_path):
    """Without its number of parameters, which other seeds of the row tell."""
    log = MetricLog(tmp_path, attempt=1)
    log.log(200, {"train/loss": 3.3, "validation/c4/loss": 3.4})
    status.write(tmp_path, Status("finished", 1, 200))
    config = run_config(run={"name": "plain-seed-0", "directory": str(tmp_path), "max_steps": 200})
    (found,) = results.results([PlannedRun("plain", 0, (), config)])
    assert (found.parameters, found.validation_loss) == (None, 3.4)
    path = tmp_path / "runs.csv"
    path.write_text(results.as_csv([found]))
    assert read_csv(path) == [found]
    for runs, cells in (
        ([found], ["3.300", "3.400"]),
        ([found, made_up("plain", 1, 3.40)], ["15,763,500", "3.300±0.000", "3.400±0.000"]),
    ):
        text = report.text(report.lines(experiment_folder.read(PUBLISHED), runs))
        assert ["plain*", *cells] in [line.split() for line in text.splitlines()]


# Runs.


def test_gpus_are_divided_among_runs(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shares(at_once, gpus):
        monkeypatch.setattr(run_experiment, "count_gpus", lambda: gpus)
        return [one.get("CUDA_VISIBLE_DEVICES") for one in run_experiment.places(at_once)[0]]

    assert shares(2, 4) == ["0,1", "2,3"]
    assert shares(3, 4) == ["0", "1", "2"]
    assert shares(2, 1) == ["0", "0"]
    assert shares(None, 2) == ["0", "1"]
    assert shares(2, 0) == [None, None]
    assert shares(None, 0) == [None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert shares(2, 2) == ["4", "7"]


def three_runs(folder, corpus):
    """Of rows a, b and c."""
    (folder / "rows").mkdir()
    for name in "abc":
        run_file(folder, corpus).rename(folder / f"rows/{name}.yaml")
    return plan_experiment(experiment_folder.read(folder / "rows"), 1, None, [], folder / "out", 1)


def train_with(script, runs, folder):
    """What comes of runs, two at once, each a process with a `script` in the place of a launcher: it gets the row and a
    folder."""
    folder.mkdir()
    runs = [replace(run, launcher=(sys.executable, "-c", script, run.row, str(folder))) for run in runs]
    return run_experiment.train_all(runs, [{}, {}], "three")


def test_a_signal_reaches_the_runs_that_train_and_no_other_is_started(small_corpus, tmp_path, capfd):
    """The second sends it once both are ready for it."""
    script = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.alarm(200)
ready = pathlib.Path(sys.argv[2], "ready")
if sys.argv[1] == "a":
    ready.touch()
elif sys.argv[1] == "b":
    while not ready.exists():
        time.sleep(0.02)
    os.kill({os.getpid()}, signal.SIGTERM)
while True:
    time.sleep(0.1)
"""
    before = signal.getsignal(signal.SIGTERM)
    assert train_with(script, three_runs(tmp_path, small_corpus), tmp_path / "shared") == 75
    assert signal.getsignal(signal.SIGTERM) is before
    printed = capfd.readouterr()
    assert sorted(line.split(" (")[0] for line in printed.out.splitlines()[1:]) == [
        f"0/3  {row}-seed-0: stopped after saving" for row in "ab"
    ]
    assert "SIGTERM: the runs that train save and stop" in printed.err


def test_runs_go_on_only_with_the_settings_that_they_were_started_with(tmp_path):
    (tmp_path / "rows").mkdir()
    run_file(tmp_path, tmp_path / "corpus").rename(tmp_path / "rows/a.yaml")
    found, out = experiment_folder.read(tmp_path / "rows"), tmp_path / "out"
    first = plan_experiment(found, 2, "4steps", ["batch.global_batch_size=32"], out, 1)
    assert [(run.name, run.config.run.seed, run.directory) for run in first] == [
        ("a-seed-0", 0, out / "a/seed-0"),
        ("a-seed-1", 1, out / "a/seed-1"),
    ]
    assert first[0].config.run.max_steps == 4
    assert first[0].config.batch.global_batch_size == 32
    more_seeds = plan_experiment(found, 3, "4steps", ["batch.global_batch_size=32"], out, 1)
    assert len(more_seeds) == 3
    (out / "a").mkdir()
    with pytest.raises(UserError, match=r"out: has runs of a with other settings or steps; give the same"):
        plan_experiment(found, 2, None, [], out, 1)


def test_a_run_that_fails_ends_no_other(small_corpus, tmp_path, capsys):
    """It fails before the others end."""
    script = """
import pathlib, signal, sys, time
signal.alarm(200)
row, failed = sys.argv[1], pathlib.Path(sys.argv[2], "failed")
if row == "a":
    failed.touch()
    print("why", end="\\n\\n")
    sys.exit(3)
while not failed.exists():
    time.sleep(0.02)
"""
    runs = three_runs(tmp_path, small_corpus)
    assert train_with(script, runs, tmp_path / "shared") == 1
    title, *lines = [line.split(" (1")[0].split(" (0")[0] for line in capsys.readouterr().out.splitlines()]
    assert title == "three, 0 of 3 runs finished"
    expected = [f"a-seed-0: failed (exit code 3), {runs[0].log}: why", "b-seed-0: finished", "c-seed-0: finished"]
    assert sorted(line[5:] for line in lines) == expected
    assert lines[-1].startswith("2/3  ")


@pytest.mark.slow
def test_an_experiment_from_runs_to_table(small_corpus, empty_mlflow, tmp_path, monkeypatch, capsys):
    """Two rows, two seeds and a row that fails. One run is cut and resumed; MLflow has another row's runs, one of which
    the real launcher starts."""
    rows = tmp_path / "rows"
    rows.mkdir()
    empty_mlflow(tmp_path)
    run_file(tmp_path, small_corpus, tracking=mlflow(tmp_path)).rename(rows / "wide.yaml")
    run_file(tmp_path, small_corpus, model={**MODEL, "d_ff": 32}).rename(rows / "narrow.yaml")
    run_file(tmp_path, tmp_path / "nowhere").rename(rows / "wrong.yaml")
    settings = {
        "groups": [{"title": "Widths", "baseline": "wide", "rows": ["wide", "narrow", "wrong"]}],
    }
    (rows / "experiment.yaml").write_text(yaml.safe_dump(settings))
    started, cut_off, real = [], [], run_experiment.start

    def start(group, run, changes):
        started.append(run.name)
        if run.name in ("wide-seed-1", "wrong-seed-0"):
            return real(group, run, changes)
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.log.touch()
        cut = ["--stop-at-step", "2"] if run.name == "narrow-seed-1" and not cut_off else []
        cut_off.extend(cut)  # the first time alone
        return group.add(Forked("train", *run.launcher[len(PYTHON) + 4 :], *cut))

    monkeypatch.setattr(run_experiment, "start", start)
    out = tmp_path / "out"

    def go():
        return experiment(rows, 2, "50%", 2, out, []).code

    assert go() == 1
    assert sorted(started) == sorted(f"{row}-seed-{seed}" for row in ("wide", "narrow", "wrong") for seed in (0, 1))
    printed = capsys.readouterr().out
    assert "narrow-seed-1: stopped after saving" in printed
    assert "wrong-seed-0: failed (exit code 2)" in printed
    assert "nowhere" in printed
    assert printed.rstrip().endswith("runs.csv; the same command tries those that failed again")

    started.clear()
    assert experiment(rows, 2, "50%", 2, out, [], train=False) == (0, out)
    assert not started
    assert go() == 1
    assert sorted(started) == ["narrow-seed-1", "wrong-seed-0", "wrong-seed-1"]
    assert {seed: status.read(out / f"narrow/seed-{seed}").attempt for seed in (0, 1)} == {0: 1, 1: 2}
    losses = {
        (row, seed): read_metrics(out / row / f"seed-{seed}")[-1].metrics["validation/small/loss"]
        for row in ("wide", "narrow")
        for seed in (0, 1)
    }
    assert len(set(losses.values())) == 4
    lines = {line.row: line for line in report.lines(experiment_folder.read(rows), read_csv(out / "runs.csv"))}
    mean = sum(losses["narrow", seed] for seed in (0, 1)) / 2
    assert lines["narrow"].compared.mean == mean
    expected = scipy.stats.ttest_rel(*([losses[row, seed] for seed in (0, 1)] for row in ("narrow", "wide")))
    assert lines["narrow"].comparison.p == pytest.approx(expected.pvalue)
    assert lines["wrong"].runs == []
    assert read_metrics(out / "wide/seed-0")[-1].step == 4
    for name in ("wrong.yaml", "experiment.yaml"):
        (rows / name).unlink()
    started.clear()
    runs = pretrain.experiment(rows, seeds=2, budget="50%", at_once=2, out=out)
    assert not started
    assert runs.set_index(["row", "seed"])["validation_loss"].to_dict() == losses

    from mlflow.tracking import MlflowClient

    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (place,) = [one for one in store.search_experiments() if one.name == "tests"]
    tracked = store.search_runs([place.experiment_id])
    assert sorted(run.info.run_name for run in tracked) == ["wide-seed-0", "wide-seed-1"]
