"""Tracks of the speedrun: what counts as a record, and the table."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import scipy.stats

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from experiments import speedrun
from experiments.speedrun import TRACKS, Track, judged
from pretrain.config import RunConfig
from pretrain.tools.experiment import experiment_folder
from pretrain.tools.experiment.results import Result, as_csv, read_csv
from tests.support.tables import each

CONFIGS = Path(__file__).parents[2] / "configs/speedrun"
TARGET = Track(target=4.0)


def runs(**rows: list[tuple[float, float]]) -> list[Result]:
    """Rows that have (loss, processor seconds) by seed."""
    return [
        Result(row, seed, 300, 1000, 4.0, loss, loss + 1, 0.2, 1.5e6, 2 * seconds, seconds)
        for row, of in rows.items()
        for seed, (loss, seconds) in enumerate(of)
    ]


@each("losses", [[3.9, 3.95, 3.97, 3.99, 3.93], [4.1, 4.0, 3.9], [3.99, 3.999], [4.2, 4.3, 4.25, 4.21]])
def test_the_chance_is_that_of_the_one_sided_t_test(losses):
    """Of a target, and of a baseline on all and on text tokens, whose losses differ by 1."""
    others = [4.05, 3.98, 4.01]
    own, baseline = ([(loss, 1.0) for loss in group] for group in (losses, others))
    (to_a_value,) = judged(TARGET, runs(own=own))
    assert to_a_value.p == pytest.approx(scipy.stats.ttest_1samp(losses, 4.0, alternative="less").pvalue)
    to_runs, _ = judged(Track("base"), runs(own=own, base=baseline))
    expected = scipy.stats.ttest_ind(losses, others, equal_var=False, alternative="less")
    assert to_runs.p == pytest.approx(expected.pvalue)


def test_one_run_has_no_chance():
    (alone,) = judged(TARGET, runs(own=[(3.9, 1.0)]))
    assert (alone.p, alone.is_record) == (None, False)
    first, second = judged(Track("base"), runs(own=[(3.9, 1.0)], base=[(4.0, 2.0), (4.1, 2.0)]))
    assert (first.p, first.times_less, second.p) == (None, None, None)


def test_a_record_needs_its_seeds_its_mean_and_certainty():
    low = [(3.9 + 0.01 * seed, 100.0) for seed in range(5)]
    wide = [(3.99 + 0.04 * seed, 50.0) for seed in (-3, -2, -1, 1, 2)]  # below the target, but by chance
    high = [(4.1 + 0.01 * seed, 60.0) for seed in range(5)]
    found = judged(TARGET, runs(low=low, four=[(loss, 70.0) for loss, _ in low[:4]], wide=wide, high=high))
    assert [one.row for one in found] == ["wide", "high", "four", "low"]
    assert [one.row for one in found if one.is_record] == ["low"]


def test_the_scatter_of_the_baseline_counts_as_the_rows_does():
    low = [(3.97 + 0.01 * seed, 50.0 + seed) for seed in range(5)]
    for scatter, seeds, is_record in ((0.01, 5, True), (0.04, 5, False), (0.01, 4, False)):
        baseline = [(4.03 + scatter * (seed - 2), 400.0 + 10 * seed) for seed in range(5)][:seeds]
        found, of_baseline = judged(Track("baseline"), runs(low=low, baseline=baseline))
        assert found.is_record == is_record
        assert (of_baseline.p, of_baseline.times_less) == (None, None)
    mean, low_end, high_end = found.times_less
    logarithms = [[math.log(seconds) for _, seconds in group] for group in (baseline, low)]
    interval = scipy.stats.ttest_ind(*logarithms, equal_var=False).confidence_interval()
    assert mean == pytest.approx(math.exp(fmean(logarithms[0]) - fmean(logarithms[1])))
    assert (low_end, high_end) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert "8.0 (7.6–8.4)" in speedrun.text(Track("baseline"), [found])


def test_a_track_may_have_the_clock_of_gpus():
    on_gpus = replace(TARGET, clock="seconds")
    found = judged(on_gpus, runs(low=[(3.9 + 0.01 * seed, 100.0) for seed in range(5)]))
    assert [one.seconds.mean for one in found] == [200.0]
    assert "CPU s" not in speedrun.text(on_gpus, found)


def test_the_table_has_the_fastest_first_and_says_what_a_record_is():
    low = [(3.9 + 0.01 * seed, 100.0 + seed) for seed in range(5)]
    found = judged(TARGET, runs(textbook=[(4.0, 283.0)], low=low))
    head, first, second, _, *note = speedrun.text(TARGET, found).split("\n")
    assert head.split() == ["row", "params", "steps", "tokens", "CPU", "s", "loss", "text", "input", "p"]
    assert first.split() == [
        *("low", "(5)", "1,000", "300", "1.50M", "102.0±1.6", "3.9200±0.0158", "4.920±0.016", "0.200±0.000"),
        *("<.001", "record"),
    ]
    assert second.split()[:7] == ["textbook", "(1)", "1,000", "300", "1.50M", "283.0", "4.0000"]
    assert note[0] == "The target is a held-out loss of 4.0."


def test_the_command_reads_what_an_experiment_wrote(tmp_path, capsys):
    made = runs(baseline=[(4.0 + seed / 100, 300.0 + seed) for seed in range(5)], narrow=[(3.5, 40.0), (3.51, 41.0)])
    file = tmp_path / "runs.csv"
    file.write_text(as_csv(made))
    assert read_csv(file) == made
    speedrun.app(["mini", str(file)], standalone_mode=False)
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert [*first.split()[:2], *second.split()[:2]] == ["narrow", "(2)", "baseline", "(5)"]
    for arguments in (["maxi", str(file)], ["mini", str(tmp_path / "none.csv")]):
        with pytest.raises(UserError, match="no such"):
            speedrun.app(arguments, standalone_mode=False)


@each("name", sorted(TRACKS))
def test_rows_of_a_track_differ_in_what_is_free(name):
    """The text, the tokenizer and the held-out loss are the track's."""
    found = experiment_folder.read(CONFIGS / name)
    assert TRACKS[name].baseline is None or TRACKS[name].baseline in found.rows
    configs = [load(path, [], RunConfig) for path in found.rows.values()]
    (first, *others) = [(run.data.validation, [source.corpus for source in run.data.train]) for run in configs]
    assert all(other == first for other in others)
    for run in configs:
        assert run.data.workers == 0 or TRACKS[name].clock == "seconds"  # whose processors wouldn't be counted
        assert {hook.hook for hook in run.evaluation} >= {"validation_loss", "input_use"}
