"""`pretrain watch`: from the files of a run alone, in a terminal and without one."""

import contextlib
import json
import math
import os
import pty
import signal
import time
from pathlib import Path

import pytest

from data_pipeline.base.errors import UserError
from pretrain.run import deaths, restarts, status
from pretrain.run.metrics_file import MetricLog
from pretrain.run.status import Status
from pretrain.tools.watch import Curves, braille, plot, watch
from pretrain.training import picture
from tests.pretrain.forked import Forked
from tests.tables import each

BRAILLE = {chr(code) for code in range(0x2801, 0x2900)}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1767225600.0)
    log = MetricLog(tmp_path, attempt=1)
    for step in range(1, 101):
        log.log(step, {"train/loss": 10 / step, "train/tokens_per_second": 1e6 + step, "train/learning_rate": 1e-3})
        if step % 50 == 0:
            log.log(step, {"validation/c4/loss": 5 / step})
    path = tmp_path / "artifacts/evaluation/samples.json"
    path.parent.mkdir(parents=True)
    rows = [
        [step, "c4", "The <extra_id_0> sat." + 30 * " on the mat", f"The [cat {step}] sat.", "x"] for step in (50, 100)
    ]
    path.write_text(json.dumps({"columns": ["step", "corpus", "given", "written", "original"], "data": rows}))
    return tmp_path


def test_a_snapshot_has_curves_and_the_last_samples_in_80_columns(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(run_dir)
    watch(Path(), once=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0].startswith(".  step 100, logged 0 s ago")
    assert "train/loss  0.1000 at step 100, lowest 0.1000" in lines
    assert "validation/c4/loss  0.0500 at step 100, lowest 0.0500" in lines
    assert next(line for line in lines if line.startswith("train/tokens_per_second")).split()[1] == "1,000,100"
    assert "written  The [cat 100] sat." in lines
    assert "cat 50" not in text
    assert sum(any(character in BRAILLE for character in line) for line in lines) > 10
    assert "\x1b" not in text


def test_a_curve_falls_where_its_values_do():
    """The top left dot is the first point, the bottom right one the last; labels are the values of their lines."""
    lines = plot([(0, 3.0), (1, 2.0), (2, 1.0)], width=20, height=5)
    assert [line.partition(" ┤")[0] for line in lines[:-1]] == ["3.00", "2.33", "1.67", "1.00"]
    assert [len(line) for line in lines[:-1]] == sorted(len(line) for line in lines[:-1])
    assert lines[-1].split() == ["0", "2"]
    gap = plot([(0, 1.0), (1, math.nan), (2, 1.0)], width=20, height=4)
    assert sum(character in BRAILLE for line in gap for character in line) == 2
    assert plot([(0, math.nan)], 20, 5) == []
    assert braille([(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)], columns=2, rows=1) == ["⡠⠊"]


def test_steps_that_a_resumed_run_takes_again_are_dropped(run_dir, capsys):
    curves = Curves(run_dir / "metrics.jsonl")
    curves.read()
    MetricLog(run_dir, attempt=2).log(41, {"train/loss": 7.0})
    curves.read()
    assert curves.of("train/loss")[-2:] == [(40, 10 / 40), (41, 7.0)]
    assert curves.of("validation/c4/loss") == []
    watch(run_dir, once=True)
    shown = capsys.readouterr().out
    assert "train/loss  7.0000 at step 41" in shown
    assert "validation/c4/loss" not in shown


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: no metrics here yet; give the directory of a run"):
        watch(tmp_path, once=True)


def test_a_terminal_follows_the_run_until_ctrl_c(run_dir):
    terminal, inside = pty.openpty()

    def until(text):
        seen = b""
        while text not in seen:
            seen += os.read(terminal, 65536)

    with Forked("watch", run_dir, terminal=os.ttyname(inside), COLUMNS="80", LINES="40", TERM="xterm") as one:
        until(b"0.1000 at step 100")
        os.close(inside)  # from here on the command alone has the terminal
        MetricLog(run_dir, attempt=1).log(101, {"train/loss": 0.0625})
        until(b"0.0625 at step 101")
        os.kill(one.pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # nobody has it any more
            until(b"nothing")
        assert one.wait() == 0


def test_a_run_that_nobody_trains_and_nobody_ended_has_died(run_dir, capsys, monkeypatch):
    """Its supervisor, if it lives, has a minute to say why. Without locks, nobody knows."""

    def shown() -> list[str]:
        watch(run_dir, once=True)
        lines = capsys.readouterr().out.splitlines()
        return [" ".join(line.split()) for line in lines if "died" in line]

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    status.write(run_dir, Status("running", 1))
    (run_dir / status.LOCK).touch()
    assert shown() == []
    monkeypatch.setattr(time, "time", lambda: 1767225600.0 + 61)
    with status.lock(run_dir):
        assert shown() == []
    said = "died on 2026-01-01 00:00 after step 100: it was killed, or its machine went down"
    assert shown() == [said]
    with monkeypatch.context() as patch:
        patch.setattr(status, "lock_file", lambda *given, **named: False)
        assert shown() == []
    deaths.record(run_dir, checkpoint=50)
    assert shown() == ["1 failure, 0 s without training after them; the last at step 100: " + deaths.CAUSE, said]
    status.write(run_dir, Status("running", 2))
    MetricLog(run_dir, attempt=2).log(101, {"train/loss": 1.0})
    assert restarts.read(run_dir)[-1].checkpoint == 50


# The picture of a run


VALIDATION = {"validation/small/text_loss": 4.29, "validation/small/unigram_entropy": 5.46}
INPUT_USE = {
    "input_use/small/loss": 4.33,
    "input_use/small/other_input_loss": 6.68,
    "input_use/small/unigram_entropy": 5.38,
    "input_use/small/bigram_entropy": 5.71,
}


def test_the_picture_says_when_a_model_does_not_read_its_input():
    def at(worth: float, loss: float) -> dict[str, float]:
        return {f"input_use/a/{name}": value for name, value in zip(NAMES, (worth, loss, 5.5), strict=True)}

    NAMES = ("worth", "loss", "unigram_entropy")
    both = "step 20: the model doesn't read its input yet (0.02 nats/token), and has not learnt how frequent tokens are"
    assert picture.verdict("a", {10: at(0.9, 5.0), 20: at(0.02, 6.0)}) == f"{both}: 6.00 > 5.50"
    assert picture.verdict("a", {20: at(0.0, 5.0)}) == "step 20: the model doesn't read its input yet (0.00 nats/token)"
    assert picture.verdict("a", {10: at(0.0, 6.0), 20: at(0.05, 6.0), 30: {"train/loss": 1.0}}) == ""
    assert picture.verdict("b", {20: at(0.0, 5.0)}) == ""


@each(
    "metrics, shown",
    [
        (VALIDATION, {"with its input": 4.29, "unigrams": 5.46}),
        (
            VALIDATION | INPUT_USE,
            {"with its input": 4.33, "with another row's input": 6.68, "unigrams": 5.38, "bigrams": 5.71},
        ),
    ],
)
def test_all_curves_are_of_the_same_rows(tmp_path, monkeypatch, metrics, shown):
    MetricLog(tmp_path, attempt=1).log(100, metrics)
    figures = []
    monkeypatch.setattr(picture, "png", lambda figure: figures.append(figure) or b"")
    picture.draw(tmp_path, tmp_path / "picture.png", attention=False)
    (axes,) = figures[0].axes
    assert {line.get_label(): pytest.approx(line.get_ydata()[-1]) for line in axes.lines} == shown
