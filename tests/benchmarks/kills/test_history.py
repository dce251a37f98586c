"""What the steps of a killed run say of lost rows, rows read twice and losses."""

from importlib import import_module

import pytest

from tests.conftest import TOP


@pytest.fixture
def history(monkeypatch):
    monkeypatch.syspath_prepend(str(TOP / "benchmarks"))
    return import_module("kills.history")


def lines(history, *steps):
    return [history.Step(number, rows, loss, 10.0 * at) for at, (number, rows, loss) in enumerate(steps)]


UNDISTURBED = ((1, (1, 2), 3.0), (2, (3, 4), 2.5), (3, (5, 6), 2.0))


def test_a_step_that_is_taken_again_counts_once(history):
    killed = lines(history, *UNDISTURBED[:2], *UNDISTURBED[1:])
    assert history.compare(lines(history, *UNDISTURBED), killed) == history.Difference(0, 0, 0.0, {1: 0, 2: 0, 3: 0})


def test_rows_that_are_skipped_are_lost_and_repeated_ones_are_read_twice(history):
    killed = lines(history, *UNDISTURBED[:2], (2, (5, 6), 2.25), (3, (1, 2), 1.0))
    assert history.compare(lines(history, *UNDISTURBED), killed) == history.Difference(
        lost=2, twice=2, loss=1.0, losses={1: 0.0, 2: 0.25, 3: 1.0}
    )


def test_a_row_that_both_runs_read_twice_is_no_difference(history):
    twice = ((1, (1, 2), 3.0), (2, (1, 2), 2.5))
    found = history.compare(lines(history, *twice), lines(history, *twice))
    assert (found.lost, found.twice) == (0, 0)


def test_the_difference_is_infinite_if_a_step_is_missing(history):
    assert history.compare(lines(history, *UNDISTURBED), lines(history, *UNDISTURBED[:2])).loss == float("inf")


def test_a_line_that_was_cut_is_left_out(history, tmp_path):
    whole = '{"step": 1, "rows": [7], "loss": 2.0, "time": 1.0}\n'
    (tmp_path / "steps.jsonl").write_text(whole + '{"step": 2, "ro\n' + whole)
    assert [step.rows for step in history.read(tmp_path / "steps.jsonl")] == [(7,), (7,)]
    assert len(history.read(tmp_path / "steps.jsonl", len(whole))) == 1
    assert history.read(tmp_path / "none.jsonl") == []


def test_moments_are_of_the_undisturbed_runs_time(history):
    """A step that takes nine times as long as the other is hit nine times as often, and at any time of the step."""
    undisturbed = [history.Step(1, (), 0.0, 100.0), history.Step(2, (), 0.0, 109.0), history.Step(3, (), 0.0, 110.0)]
    drawn = history.moments(undisturbed, 2000, seed=0)
    first = [kill.delay for kill in drawn if kill.step == 1]
    assert {kill.step for kill in drawn} == {1, 2}
    assert 0.88 < len(first) / 2000 < 0.92  # a deviation is 0.0067
    assert 4.3 < sum(first) / len(first) < 4.7
    assert drawn == sorted(drawn, key=lambda kill: (kill.step, kill.delay))
    assert drawn == history.moments(undisturbed, 2000, seed=0) != history.moments(undisturbed, 2000, seed=1)
