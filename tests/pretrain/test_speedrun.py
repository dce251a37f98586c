"""Tracks of the speedrun: what counts as a record, and the table."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import scipy.stats

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from pretrain.tools.experiment import experiment_file, speedrun
from pretrain.tools.experiment.experiment_file import Experiment, Speedrun
from pretrain.tools.experiment.results import Result
from pretrain.tools.experiment.statistics import Spread, Welch
from tests.tables import each

TRACKS = Path(__file__).parents[2] / "configs/speedrun"


def result(row: str, seed: int, loss: float, seconds: float, worth: float | None = 0.2) -> Result:
    return Result(
        row, seed, 300, 1000, 4.0, loss, None, None, [(300, loss)], loss + 1, worth, 1.5e6, 2 * seconds, seconds
    )


def track(**rows: list[tuple[float, float]]) -> tuple[Experiment, list[Result]]:
    """An experiment whose rows have (loss, processor seconds) by seed."""
    found = Experiment("mini", {row: Path(row) for row in rows}, [], {}, Speedrun(target=4.0))
    return found, [result(row, seed, *one) for row, of in rows.items() for seed, one in enumerate(of)]


@each("losses", [[3.9, 3.95, 3.97, 3.99, 3.93], [4.1, 4.0, 3.9], [3.99, 3.999], [4.2, 4.3, 4.25, 4.21]])
def test_the_chance_is_that_of_the_one_sided_t_test(losses):
    own = Spread.of(losses)
    assert own is not None
    to_a_value, to_runs = Welch.of(own, Spread(4.0, 0.0, 2)), Welch.of(own, Spread.of([4.05, 3.98, 4.01]))
    assert to_a_value.p == pytest.approx(scipy.stats.ttest_1samp(losses, 4.0, alternative="less").pvalue)
    expected = scipy.stats.ttest_ind(losses, [4.05, 3.98, 4.01], equal_var=False, alternative="less")
    assert to_runs.p == pytest.approx(expected.pvalue)
    two_sided = scipy.stats.ttest_ind(losses, [4.05, 3.98, 4.01], equal_var=False)
    assert to_runs.interval == pytest.approx(tuple(two_sided.confidence_interval()))


def test_a_value_without_scatter_is_below_or_not():
    assert [Welch.of(Spread(one, 0.0, 2), Spread(4.0, 0.0, 2)).p for one in (3.9, 4.0)] == [0.0, 1.0]
    assert Welch.of(Spread(3.9, None, 1), Spread(4.0, 0.0, 2)) is None


def test_a_record_needs_its_seeds_its_mean_and_certainty():
    low = [(3.9 + 0.01 * seed, 100.0) for seed in range(5)]
    wide = [(3.99 + 0.04 * seed, 50.0) for seed in (-3, -2, -1, 1, 2)]  # below the target, but by chance
    high = [(4.1 + 0.01 * seed, 60.0) for seed in range(5)]
    found = speedrun.attempts(*track(low=low, four=[(loss, 70.0) for loss, _ in low[:4]], wide=wide, high=high))
    assert [(one.row, one.is_record) for one in found] == [
        ("wide", False),
        ("high", False),
        ("four", False),
        ("low", True),
    ]


def test_the_scatter_of_the_baseline_counts_as_the_rows_does():
    low = [(3.97 + 0.01 * seed, 50.0 + seed) for seed in range(5)]
    for scatter, seeds, is_record in ((0.01, 5, True), (0.04, 5, False), (0.01, 4, False)):
        baseline = [(4.03 + scatter * (seed - 2), 400.0 + 10 * seed) for seed in range(5)][:seeds]
        experiment, runs = track(low=low, baseline=baseline)
        experiment = replace(experiment, speedrun=Speedrun(baseline="baseline"))
        found, of_baseline = speedrun.attempts(experiment, runs)
        assert found.is_record == is_record
        assert (of_baseline.p, of_baseline.times_less) == (None, None)
    mean, low_end, high_end = found.times_less
    logarithms = [[math.log(seconds) for _, seconds in group] for group in (baseline, low)]
    interval = scipy.stats.ttest_ind(*logarithms, equal_var=False).confidence_interval()
    assert mean == pytest.approx(math.exp(fmean(logarithms[0]) - fmean(logarithms[1])))
    assert (low_end, high_end) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert "8.0 (7.6–8.4)" in speedrun.text(experiment, runs)
    with pytest.raises(ValueError, match="either a baseline or a target"):
        Speedrun(baseline="baseline", target=4.0)


def test_a_track_may_have_the_clock_of_gpus():
    experiment, runs = track(low=[(3.9 + 0.01 * seed, 100.0) for seed in range(5)])
    on_gpus = replace(experiment, speedrun=Speedrun(target=4.0, clock="wall"))
    assert [one.seconds.mean for one in speedrun.attempts(on_gpus, runs)] == [200.0]
    assert "CPU s" not in speedrun.text(on_gpus, runs)


def test_the_table_has_the_fastest_first_and_says_what_a_record_is():
    low = [(3.9 + 0.01 * seed, 100.0 + seed) for seed in range(5)]
    found = track(textbook=[(4.0, 283.0)], low=low, unfinished=[])
    head, first, second, _, *note = speedrun.text(*found).split("\n")
    assert head.split() == ["row", "params", "steps", "tokens", "CPU", "s", "loss", "text", "input", "p"]
    assert first.split() == [
        *("low", "(5)", "1,000", "300", "1.50M", "102.0±1.6", "3.9200±0.0158", "4.920±0.016", "0.200±0.000"),
        *("<.001", "record"),
    ]
    assert second.split()[:7] == ["textbook", "(1)", "1,000", "300", "1.50M", "283.0", "4.0000"]
    assert note[0] == "The target is a held-out loss of 4.0."
    assert speedrun.markdown(*found).startswith("| row | params |")
    head, empty, *_ = speedrun.text(*track(unfinished=[])).split("\n")
    assert (head.split()[:2], empty) == (["row", "params"], "")


@each("name", sorted(path.name for path in TRACKS.iterdir()))
def test_rows_of_a_track_differ_in_what_is_free(name):
    """The text, the tokenizer and the held-out loss are the track's."""
    found = experiment_file.read(TRACKS / name)
    assert found.speedrun is not None
    runs = [load(path, [], RunConfig) for path in found.rows.values()]
    (first, *others) = [(run.data.validation, [source.corpus for source in run.data.train]) for run in runs]
    assert all(other == first for other in others)
    for run in runs:
        assert run.data.workers == 0 or found.speedrun.clock == "wall"  # whose processor seconds wouldn't be counted
        assert {hook.hook for hook in run.evaluation} >= {"validation_loss", "input_use"}
