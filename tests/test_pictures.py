"""The pictures that docs/pictures draws."""

import json

import pytest

from docs.pictures import objectives, speedrun


def test_the_picture_of_objectives_is_what_they_make_today():
    assert objectives.OUT.read_text() == objectives.svg()


def test_curves_of_the_speedrun_add_up_the_seconds_between_two_lines(tmp_path, monkeypatch):
    runs = {0: [(25, 4.0, 6.0), (50, 2.0, 5.0)], 1: [(25, 6.0, 5.0), (50, 4.0, 4.0), (75, 1.0, 3.0)]}
    (tmp_path / "mini").mkdir()
    for seed, lines in runs.items():
        rows = [(step, {"train/processor_seconds": time, "train/loss": loss}) for step, time, loss in lines]
        rows.append((lines[-1][0], {"validation/text/loss": 2.0 + seed, "validation/text/text_loss": 9.0}))
        written = [{"step": step, "attempt": 1, "time": 0.0, "metrics": metrics} for step, metrics in rows]
        path = tmp_path / f"mini/baseline-seed-{seed}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path)
    logs = speedrun.curves_of(tmp_path / "mini", "baseline")
    curves = [speedrun.curve(log) for log in logs]
    assert curves[1] == [(25, 6.0, 5.0), (50, 10.0, 4.0), (75, 11.0, 3.0)]
    assert speedrun.mean(curves) == [(25, 5.0, 5.5), (50, 8.0, 4.5)]
    assert [speedrun.held_out(log) for log in logs] == [2.0, 3.0]
    assert speedrun.target("mini") == pytest.approx(2.5)
