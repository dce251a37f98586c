"""Cells of the fault matrix, one for each mechanism; `python -m tests.fault_matrix` runs all of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.faults import verdicts
from tests.faults.builds import Builds
from tests.faults.builds import draw as draw_build
from tests.faults.cells import MLFLOW, RANKS, STEPS, Cell, draw
from tests.faults.happening import DRAWN
from tests.faults.matrix import Matrix
from tests.faults.planted import POINTS
from tests.faults.verdicts import Outcome, Verdict, finished, summary
from tests.launch import two_hosts

SEED, ALL = 1, range(200)
CHOSEN = {  # of a sixth of the cells, those that take seconds
    0: "goes on with one rank",
    3: "dies as it starts",
    13: "a torn file",
    30: "the disk",
    51: "a checkpoint in memory that isn't read",
    62: "weights that are compared",
    85: "stops and is killed by its watchdog, right after a resume",
    96: "the head is started again",
    97: "a loader's worker",
    113: "MLflow",
}
CHOSEN_OF_HOSTS = {24: "a host with its memory", 134: "a connection that comes back"}
CELL = Cell(7, "SIGKILL", "step", rank=1, step=9)
ROWS = {step: [f"row {step}"] for step in range(STEPS)}


@pytest.fixture(scope="module")
def matrix():
    with Matrix(made_once("fault_matrix", lambda folder: None)) as matrix:
        yield matrix


@pytest.mark.slow
@pytest.mark.parametrize("number", CHOSEN, ids=CHOSEN.values())
def test_a_run_under_a_fault_ends_like_the_undisturbed_one(matrix, number):
    verdict = matrix.judged(draw(SEED, number))
    print(verdicts.line(verdict))
    assert verdict.problems == []


@pytest.mark.slow
def test_a_step_that_the_next_attempt_goes_on_from_is_in_the_log(matrix):
    """Rank 0 dies as it logs a step, when the checkpoint in memory would be whole if it had been begun before."""
    assert matrix.judged(Cell(-2, "SIGKILL two seconds later", "log", rank=0, step=20)).problems == []


@pytest.mark.slow
def test_a_run_that_dies_as_it_writes_its_last_checkpoint_has_it_in_the_end(matrix):
    """All steps are taken, but what is in memory goes with the run."""
    assert matrix.judged(Cell(-4, "SIGKILL two seconds later", "write of a save", rank=0, step=35)).problems == []


@pytest.mark.slow
def test_the_rank_whose_write_of_a_save_hangs_is_named(matrix):
    """All ranks wait for it, in rounds that they take together."""
    assert matrix.judged(Cell(-3, "hang", "write of a save", rank=1, step=15)).problems == []


@pytest.mark.slow
@pytest.mark.skipif(two_hosts.lacking() is not None, reason=str(two_hosts.lacking()))
@pytest.mark.parametrize("number", CHOSEN_OF_HOSTS, ids=CHOSEN_OF_HOSTS.values())
def test_a_run_on_two_hosts_under_a_fault_ends_like_the_undisturbed_one(matrix, number):
    verdict = matrix.judged(draw(SEED, number))
    print(verdicts.line(verdict))
    assert verdict.problems == []


@pytest.mark.slow
def test_a_build_under_a_fault_ends_with_the_same_bytes(tmp_path):
    builds = Builds(tmp_path)
    cell = draw_build(SEED, 0, builds.stages)
    assert builds.judged(replace(cell, fault="the driver killed", stage="shards")) == []


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
    (folder / "stderr").write_text("rank 1 was killed by SIGKILL; its log: x\nstarting attempt 2 (faults.restarts)\n")
    (folder / "stdout").touch()
    (folder / "marker").touch()


def test_a_verdict_names_each_difference(tmp_path):
    losses = {step: 1 / step for step in range(1, STEPS + 1)}
    ended(tmp_path / "a", losses, ROWS)
    undisturbed = verdicts.outcome(tmp_path / "a")
    assert undisturbed == Outcome(losses, ROWS, {})

    def problems(cell: Cell = CELL, expected: Outcome = undisturbed, folder: str = "a") -> list[str]:
        return verdicts.judged(cell, [0], tmp_path / folder, expected, [], []).problems

    assert problems() == []
    assert verdicts.judged(CELL, [0], tmp_path / "a", undisturbed, [], []).steps_twice == 1
    assert problems(expected=replace(undisturbed, weights={"rank-00000.safetensors": "0"})) == ["other weights"]
    assert problems(expected=replace(undisturbed, losses={**losses, 9: 0.1112})) == ["other losses"]
    other = ROWS | {5: ["row 6"]}
    assert problems(expected=replace(undisturbed, rows=other)) == ["other rows in the steps from index 5 on"]
    assert problems(replace(CELL, rank=0)) == ["the first line doesn't say 'rank 0 was killed by SIGKILL'"]
    assert problems(replace(CELL, ranks_after=RANKS - 1)) == ["exit codes [0], not [1, 0]"]


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
