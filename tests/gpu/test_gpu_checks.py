"""The runner of `make gpu`: lines of JSON, limits and a budget that hold, and what training needs to be installed.

The planted checks start in this module, within limits of seconds: it doesn't import PyTorch.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from tests.gpu.checks import CHECKS
from tests.gpu.report import Report, plain
from tests.gpu.runner import ROOT, Lines, Place, Planned, run

CPU = Place("cpu", small=True)
CHILD = "import time; time.sleep(600)"


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
    """Waits for a process that has left its session."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    report.fact("child", child.pid)
    child.wait()


def planted(function: Any, limit: float = 60.0) -> Planned:
    return Planned(function.__name__, __name__, function.__name__, limit)


def lines_of(checks: list[Planned], budget: float) -> tuple[list[dict[str, Any]], int]:
    """The lines of a run, and how many checks failed."""
    out = StringIO()
    bad = run(checks, CPU, budget, Lines(out))
    return [json.loads(line) for line in out.getvalue().splitlines()], bad


def runs(pid: int) -> bool:
    """Whether the process exists and isn't just one that nobody has waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- the runner


@pytest.mark.slow
def test_a_check_that_fails_breaks_or_hangs_does_not_stop_the_next():
    checks = [planted(failing), planted(breaking), planted(hanging, limit=6.0), planted(passing)]
    started = time.monotonic()
    (failed, broken, hung, passed, summary), bad = lines_of(checks, 300)
    assert (failed["outcome"], failed["held"]) == ("failed", 1)
    assert failed["wrong"] == {"a part that raises": "ValueError: planted", "one": [1, 2]}
    assert (broken["outcome"], broken["held"], broken["exit_code"]) == ("failed", 1, -6)
    assert broken["output"].startswith("the last words\n")
    assert hung["outcome"] == "timeout"
    assert 6 <= hung["seconds"] < 30
    assert not runs(hung["facts"]["child"])
    assert (passed["outcome"], passed["wrong"], passed["skipped"]) == ("passed", {}, {"a part": "no reason"})
    assert (passed["facts"], passed["tables"]) == ({"device": "cpu"}, {"table": [{"width": 1.0}]})
    assert summary["summary"] == {"failed": ["failing", "breaking"], "timeout": ["hanging"], "passed": ["passing"]}
    assert summary["seconds"] <= time.monotonic() - started + 0.1
    assert bad == 3


def test_the_budget_holds_for_all_checks_together():
    started = time.monotonic()
    (hung, unreached, summary), bad = lines_of([planted(hanging, limit=20), planted(passing)], budget=7)
    assert time.monotonic() - started < 12
    assert (hung["outcome"], unreached["outcome"]) == ("timeout", "unreached")
    assert hung["limit"] <= 6
    assert summary["summary"] == {"timeout": ["hanging"], "unreached": ["passing"]}
    assert bad == 1


@pytest.mark.slow
def test_every_line_is_written_when_its_check_ends(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--only", "machine", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_text() == done.stdout
    machine, summary = map(json.loads, done.stdout.splitlines())
    assert machine["check"] == "machine"
    assert machine["facts"]["bf16_products_tflops"]["256 × 256 × 256"] > 0
    assert summary["device"] == "cpu"


def test_checks_have_names_of_their_own_and_can_be_listed():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    listed = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == names
    for check in CHECKS:
        assert (ROOT / f"{check.module.replace('.', '/')}.py").exists()


def test_numbers_are_rounded_and_nan_is_a_string():
    assert plain({1: (0.123456, float("nan"), None, True)}) == {"1": [0.1235, "nan", None, True]}


def test_overlapping_kernels_count_once():
    from tests.gpu.checks.speed import busy  # imports PyTorch, which the planted checks here don't need

    assert busy([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == 5.0
    assert busy([]) == 0.0


# ---- what a bare machine needs

ABSENT = (
    "brotli",
    "fasttext",
    "langdetect",
    "mlflow",
    "nltk",
    "pycld2",
    "ray",
    "rensa",
    "resiliparse",
    "scipy",
    "webdataset",
    "xdist",
)


@pytest.mark.slow
def test_training_needs_no_library_of_the_data_pipeline_and_no_mlflow(monkeypatch):
    """A run that chooses its micro-batch, trains and saves, from a corpus made on the spot; and the launcher."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/gpu/hooks'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("ABSENT_MODULES", ",".join([*ABSENT, "zstandard"]))
    (micro_batch,) = [check for check in CHECKS if check.name == "auto_micro_batch"]
    (line, _), bad = lines_of([replace(micro_batch, limit=400)], 410)  # a busy machine takes long to start it
    assert bad == 0, line
    assert line["facts"]["metrics"]["checkpoint/gigabytes"] > 0
    modules = ["launch.local", "pretrain.cli", *sorted({check.module for check in CHECKS}), "ray"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(f"import {module}" for module in modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'ray'"  # the last of them


def names_in(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {_normal(line) for line in lines if line and not line.startswith("#")}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# With torch, triton and transformers come these.
WITH_TORCH = {"torch", "numpy", "packaging", "pyyaml", "tqdm", "typing-extensions"}


def test_the_wheels_for_a_bare_machine_bring_what_they_need():
    wheels = names_in(ROOT / "tests/gpu/requirements.txt")
    for name in wheels:
        for wanted in map(Requirement, importlib.metadata.requires(name) or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                assert _normal(wanted.name) in wheels | WITH_TORCH, name
    locked = {_normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert wheels <= locked
