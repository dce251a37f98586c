"""The runner of `make gpu`: lines of JSON, limits and a budget that hold, and what training needs to be installed.

The planted checks start in this module: it doesn't import PyTorch.
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normalized

from checks.gpu import runner
from checks.gpu.checks import CHECKS
from checks.gpu.report import Report, plain
from checks.gpu.runner import ROOT, Lines, Place, Planned, run
from tests.processes import runs

CPU = Place("cpu", small=True)


# ---- planted checks, which the runner starts in processes of their own


def passing(report: Report) -> None:
    report.fact("device", report.kind)
    report.row("table", width=1.0)
    report.expect("true", True)
    report.skip("a part", "no reason")


def failing(report: Report) -> None:
    with report.part("a part that raises"):
        raise ValueError("planted")
    report.expect("one", 1 > 2, [1, 2])
    report.expect("another", True)


def breaking(report: Report) -> None:
    print("the last words")
    report.expect("before", True)
    os.abort()


def hanging(report: Report) -> None:
    """Waits for a process that has left its session, and has the runner's limit reached."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    report.fact("child", child.pid)
    os.kill(os.getppid(), signal.SIGUSR1)
    child.wait()


def planted(function: Any, limit: float = 200.0) -> Planned:
    return Planned(function.__name__, __name__, function.__name__, limit)


# ---- the runner


def test_a_check_that_fails_breaks_or_hangs_does_not_stop_the_next():
    def reach_limit(*_: object) -> None:
        raise subprocess.TimeoutExpired("", 200)

    before = signal.signal(signal.SIGUSR1, reach_limit)
    out, file = StringIO(), StringIO()
    checks = [planted(failing), planted(breaking), planted(hanging), planted(passing)]
    assert run(checks, CPU, 1000, Lines(out, file)) == 3
    signal.signal(signal.SIGUSR1, before)
    assert file.getvalue() == out.getvalue()
    failed, broken, hung, passed, summary = map(json.loads, out.getvalue().splitlines())
    assert (failed["outcome"], failed["held"]) == ("failed", 1)
    assert failed["wrong"] == {"a part that raises": "ValueError: planted", "one": [1, 2]}
    assert (broken["outcome"], broken["held"], broken["exit_code"]) == ("failed", 1, -6)
    assert broken["output"].startswith("the last words\n")
    assert (hung["outcome"], hung["limit"]) == ("timeout", 200)
    assert not runs(hung["facts"]["child"])
    assert (passed["outcome"], passed["wrong"], passed["skipped"]) == ("passed", {}, {"a part": "no reason"})
    assert (passed["facts"], passed["tables"]) == ({"device": "cpu"}, {"table": [{"width": 1.0}]})
    assert summary["summary"] == {"failed": ["failing", "breaking"], "timeout": ["hanging"], "passed": ["passing"]}


def test_the_budget_holds_for_all_checks_together(monkeypatch):
    """By a clock that only checks advance, each by all that it may take; a second is kept for its end."""
    now, limits = [0.0], []

    def take_all(check: Planned, place: Place, limit: float) -> dict[str, Any]:
        limits.append(limit)
        now[0] += limit
        return {"outcome": "timeout"}

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(runner, "_run_one", take_all)
    out = StringIO()
    checks = [planted(hanging, 4), planted(failing, 8), planted(passing, 1)]
    assert run(checks, CPU, 7, Lines(out)) == 2
    *_, unreached, summary = map(json.loads, out.getvalue().splitlines())
    assert limits == [4, 2]
    assert unreached == {"check": "passing", "outcome": "unreached", "seconds_left": 0}
    assert summary["summary"] == {"timeout": ["hanging", "failing"], "unreached": ["passing"]}


def test_the_checks_are_whole_and_can_be_listed():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    command = [sys.executable, "-m", "checks.gpu", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == names
    for check in CHECKS:
        assert callable(getattr(import_module(check.module), check.function)), check.name
    files = {path.stem for path in (ROOT / "checks/gpu/checks").glob("*.py")} - {"__init__"}
    assert {check.module.rpartition(".")[2] for check in CHECKS} == files
    page = (ROOT / "docs/reference/gpu-checks.md").read_text()
    assert re.findall(r"(?m)^\| `(\w+)` \|", page) == names


def test_numbers_are_rounded_nan_is_a_string_and_overlapping_kernels_count_once():
    assert plain({1: (0.123456, float("nan"), None, True)}) == {"1": [0.1235, "nan", None, True]}
    from checks.gpu.checks.speed import busy  # imports PyTorch, which the planted checks here don't need

    assert busy([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == 5.0
    assert busy([]) == 0.0


# ---- what a bare machine needs

ABSENT = "brotli,fasttext,langdetect,mlflow,punkt,pycld2,ray,rensa,resiliparse,scipy,webdataset,xdist,zlib_ng,zstandard"


@pytest.mark.slow
def test_training_needs_no_library_of_the_data_pipeline_and_no_mlflow(monkeypatch):
    """A run that chooses its micro-batch, trains and saves, from a corpus made on the spot; and the launcher."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'checks/gpu/hooks'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("ABSENT_MODULES", ABSENT)
    (micro_batch,) = [check for check in CHECKS if check.name == "auto_micro_batch"]
    out = StringIO()
    bad = run([replace(micro_batch, limit=800)], CPU, 801, Lines(out))
    line = json.loads(out.getvalue().splitlines()[0])
    assert bad == 0, line
    assert line["facts"]["metrics"]["checkpoint/gigabytes"] > 0
    modules = ["launch.attempts", "pretrain.cli", *sorted({check.module for check in CHECKS}), "ray"]
    command = [sys.executable, "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'ray'"  # the last of them


# With torch, triton and transformers come these.
WITH_TORCH = {"torch", "numpy", "packaging", "pyyaml", "tqdm", "typing-extensions"}


def test_the_wheels_for_a_bare_machine_bring_what_they_need():
    lines = (ROOT / "checks/gpu/requirements.txt").read_text().splitlines()
    wheels = {normalized(line) for line in lines if line and not line.startswith("#")}
    for name in wheels:
        for wanted in map(Requirement, importlib.metadata.requires(name) or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                assert normalized(wanted.name) in wheels | WITH_TORCH, name
    locked = {normalized(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert wheels <= locked
