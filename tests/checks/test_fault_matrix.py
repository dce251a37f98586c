"""Cells of the fault matrix, each of a mechanism of its own; `make faults` runs all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from checks.faults import verdicts
from checks.faults.cells import MLFLOW, RANKS, STEPS, Cell, draw
from checks.faults.happening import DRAWN
from checks.faults.matrix import Matrix
from checks.faults.planted import POINTS
from checks.faults.verdicts import Outcome, Verdict, finished, first_line, summary

SEED, ALL = 1, range(200)
CHOSEN = {
    86: "continues with one rank",
    73: "a torn file",
    201: "a torn checkpoint",
    748: "stops and is killed by its watchdog, right after a resume",
    136: "MLflow",
    -2: "a step that the next attempt resumes from is in the log",
}
# With `make soak`. `make prove` also continues a killed run with one rank, and test_damaged_checkpoints.py tears files.
LONG = (748, 136, 86, 73)
CELL = Cell(7, "SIGKILL", "step", rank=1, step=9)
ROWS = {step: [f"row {step}"] for step in range(STEPS)}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with Matrix(tmp_path_factory.mktemp("matrix"), patience=4) as matrix:
        yield matrix


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, id=what, marks=[pytest.mark.soak] * (number in LONG)) for number, what in CHOSEN.items()],
)
def test_a_run_under_a_fault_ends_like_the_undisturbed_one(matrix, number):
    verdict = matrix.judged(draw(SEED, number))
    print(verdicts.line(verdict))
    assert verdict.problems == []


def test_each_cell_is_drawn_by_its_number_and_they_have_every_fault_and_point():
    cells = [draw(SEED, number) for number in ALL]
    assert cells[17] == draw(SEED, 17)
    assert {cell.fault for cell in cells} == {*DRAWN, *MLFLOW}
    assert {cell.point for cell in cells} >= POINTS.keys() - {"log"}
    assert [cell.number for cell in cells if cell.hosts == 2] == list(ALL[4::5])
    assert {cell.attempt for cell in cells} == {cell.ranks_after for cell in cells} == {1, 2}


def ended(folder: Path, losses: dict[int, float], rows: dict[int, list[str]]) -> None:
    """What a run leaves that a verdict reads, with rank 1 killed in the middle."""
    (folder / "rows").mkdir(parents=True)
    (folder / "run").mkdir()
    lines = [
        {"attempt": 1, "step": step, "time": 0.0, "metrics": {"train/loss": loss}} for step, loss in losses.items()
    ]
    lines.append({**lines[8], "attempt": 2})  # step 9, taken twice
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded = [{"step": step, "rank": 0, "ranks": 1, "rows": taken} for step, taken in rows.items()]
    (folder / "rows/1-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded))
    (folder / "stderr").write_text(
        "rank 1 was killed by SIGKILL; its log: x\nstarting attempt 2 (faults.max_restarts)\n"
    )
    (folder / "stdout").touch()
    (folder / "marker").touch()


def test_a_verdict_names_each_difference(tmp_path):
    losses = {step: 1 / step for step in range(1, STEPS + 1)}
    ended(tmp_path / "a", losses, ROWS)
    undisturbed = verdicts.outcome(tmp_path / "a")
    assert undisturbed == Outcome(losses, ROWS, {})

    def problems(cell: Cell = CELL, expected: Outcome = undisturbed) -> list[str]:
        return verdicts.judged(cell, [0], tmp_path / "a", expected, [], []).problems

    assert problems() == []
    assert verdicts.judged(CELL, [0], tmp_path / "a", undisturbed, [], []).steps_twice == 1
    assert problems(expected=replace(undisturbed, weights={"rank-00000.safetensors": "0"})) == ["other weights"]
    assert problems(expected=replace(undisturbed, losses={**losses, 9: 0.1112})) == ["other losses"]
    other = ROWS | {5: ["row 6"]}
    assert problems(expected=replace(undisturbed, rows=other)) == ["other rows in the steps from index 5 on"]
    assert problems(replace(CELL, rank=0)) == ["the first line doesn't say 'rank 0 was killed by SIGKILL'"]
    assert problems(replace(CELL, ranks_after=RANKS - 1)) == ["exit codes [0], not [1, 0]"]


def test_warnings_of_something_else_may_come_before_the_line_that_names_the_fault(tmp_path):
    (tmp_path / "stdout").write_text("MLflow answers 500\n")
    aside = "warning: rank 1 (host, CPU) is slow: a step takes 3 × as long\nrank 1 (host, CPU) is no longer slow\n"
    died, full = "rank 0 was killed by SIGKILL\n", "warning: step 10 can't be saved: No space left on device\n"
    for said, named, first in (
        (aside + died, "rank 0 was killed", died),
        (aside + full + died, "No space left", full),
        (aside + full + died, "rank 0 was killed", died),
        ("RuntimeError: a peer is gone\n" + died, "rank 0 was killed", "RuntimeError: a peer is gone\n"),
        (aside, "MLflow", "MLflow answers 500\n"),
        (aside, None, "MLflow answers 500\n"),
        (died + "starting attempt 2 \n" + aside + full, "No space left", full),
    ):
        (tmp_path / "stderr").write_text(said)
        assert first_line(tmp_path, "starting attempt 2" in said, named) == first.strip(), said


def test_verdicts_are_kept_and_summed_up(tmp_path):
    file = tmp_path / "verdicts.jsonl"
    first = Verdict(CELL, [0], detected=0.2, recovered=2.0, steps_twice=1)
    late = Verdict(replace(CELL, number=8), [0], detected=1.5, recovered=4.0)
    wrong = Verdict(replace(CELL, number=9, fault="hang"), [1], ["other losses"], detected=10.5)
    again = Verdict(replace(CELL, number=10), [1, 0], recovered=14.0)
    for verdict in (first, late, wrong):
        verdicts.append(file, SEED, verdict)
    verdicts.forget(file, 8)
    assert finished(file, SEED) == {7: first, 9: wrong}
    assert finished(file, SEED + 1) == {}
    found = summary([first, late, wrong, again])
    assert (found["cells"], found["same"], found["not_same"], found["detected_late"]) == (4, 3, [9], [8])
    assert found["mttr_one_host"] == {"n": 2, "p50": 3.0, "p95": 4.0}
    assert found["recovery_by_another_command"] == {"n": 1, "p50": 14.0, "p95": 14.0}
    assert found["detection_of_hangs"] == {"n": 1, "p50": 10.5, "p95": 10.5}
