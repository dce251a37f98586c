"""Kills of a small program that resumes well, of one that forgets its place, and of one that fails at a checkpoint."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOP

STEPS, EVERY = 12, 4
PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from kills.record import Record

folder, kind, steps, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
record, weight, done = Record(folder), torch.zeros(2), 0
found = sorted(folder.glob("checkpoint-*"))
if found:
    saved = json.loads((found[-1] / "state.json").read_text())
    done, weight = saved["step"], torch.tensor(saved["weight"])
first = 0 if kind == "forgets" else done
for number in range(done + 1, steps + 1):
    time.sleep(0.05)
    row = first + number - done
    weight = weight + row
    record.step(number, [row], float(weight.sum()))
    if number % every == 0:
        checkpoint = folder / f"checkpoint-{number:03d}"
        checkpoint.mkdir()
        if kind == "cut" and number == 2 * every and not (folder / "was-here").exists():
            (folder / "was-here").touch()
            time.sleep(120)
        (checkpoint / "state.json").write_text(json.dumps({"step": number, "weight": weight.tolist()}))
record.weights({"weight": weight})
"""


@pytest.fixture
def kills(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(TOP / "benchmarks"))
    for name in ("driver", "history", "peers", "record", "runs"):
        import_module(f"kills.{name}")
    return import_module("kills")


def peer(kills: Any, folder: Path, kind: str) -> Any:
    (folder / "program.py").write_text(PROGRAM)

    @dataclass(frozen=True)
    class Program(kills.peers.Peer):
        def command(self, python: Path, work: Path, folder: Path, seed: int, steps: int) -> list[str]:
            return [str(python), str(work / "program.py"), str(folder), kind, str(steps), str(EVERY)]

    return Program(kind, "checkpoint-*", requirements="none")


def measured(kills: Any, folder: Path, kind: str, number: int) -> Any:
    program = peer(kills, folder, kind)
    return kills.driver.measure(program, Path(kills.driver.sys.executable), folder, 0, STEPS, number)[0]


def test_a_program_that_resumes_well_is_as_if_it_were_never_killed(kills, tmp_path):
    result = measured(kills, tmp_path, "resumes", 2)
    assert (result.kills, result.rows, result.lost, result.twice) == (2, STEPS, 0, 0)
    assert (result.loss, result.weights, result.control, result.removed, result.crashes) == (0, 0, None, 0, 0)


def test_rows_that_a_program_reads_again_are_counted(kills, tmp_path):
    """After a resume from step 8 this program trains on rows 1 to 4, not 9 to 12."""
    program = peer(kills, tmp_path, "forgets")
    undisturbed = kills.runs.run(program, Path(kills.driver.sys.executable), tmp_path, tmp_path / "one", 0, STEPS)
    kill = [kills.history.Kill(9, 0.0)]
    killed = kills.runs.run(program, Path(kills.driver.sys.executable), tmp_path, tmp_path / "other", 0, STEPS, kill)
    assert killed.kills == kill
    found = kills.history.compare(undisturbed.steps, killed.steps)
    assert (found.lost, found.twice) == (4, 4)
    assert kills.driver.largest_difference(tmp_path / "one/weights.pt", tmp_path / "other/weights.pt") == 32


def test_a_checkpoint_that_no_start_can_read_is_moved_away(kills, tmp_path):
    """The kill comes while the second checkpoint is an empty folder. Two starts fail, and a third one has the first
    checkpoint."""
    program, python = peer(kills, tmp_path, "cut"), Path(kills.driver.sys.executable)
    killed = kills.runs.run(program, python, tmp_path, tmp_path / "run", 0, STEPS, [kills.history.Kill(8, 0.3)])
    assert killed.removed == ["checkpoint-008"]
    assert ["FileNotFoundError" in line for line in killed.crashes] == [True, True]
    assert [step.rows[0] for step in kills.history.effective(killed.steps).values()] == [*range(1, STEPS + 1)]


def test_a_program_that_never_starts_is_given_up(kills, tmp_path):
    program = peer(kills, tmp_path, "resumes")
    (tmp_path / "program.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(kills.runs.Stuck, match="no such model"):
        kills.runs.run(program, Path(kills.driver.sys.executable), tmp_path, tmp_path / "run", 0, STEPS)
