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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normalized

from checks.gpu import runner
from checks.gpu.checks import BUDGETS, CHECKS
from checks.gpu.report import Report, findings, plain
from checks.gpu.runner import ROOT, Place, Planned, run
from tests.support.processes import runs

CPU = Place("cpu")


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


def cut_off(report: Report) -> None:
    report.lines.write_text('{"check": "cut_off", "fac')
    os.kill(os.getpid(), signal.SIGKILL)


def planted(function: Any, limit: float = 200.0) -> Planned:
    return Planned(function.__name__, __name__, function.__name__, limit)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the runner


def test_a_check_that_fails_breaks_or_hangs_does_not_stop_the_next(tmp_path, capfd):
    def reach_limit(*_: object) -> None:
        raise subprocess.TimeoutExpired("", 200)

    before = signal.signal(signal.SIGUSR1, reach_limit)
    checks = [planted(failing), planted(breaking), planted(hanging), planted(passing)]
    assert run(checks, CPU, 1000, tmp_path / "new/lines") == 3
    signal.signal(signal.SIGUSR1, before)
    lines = lines_of(tmp_path / "new/lines")
    failed, broken, hung, passed, summary = closing = [one for one in lines if {"outcome", "summary"} & one.keys()]
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == closing
    assert (failed["outcome"], failed["held"]) == ("failed", 1)
    assert failed["wrong"] == {"a part that raises": "ValueError: planted", "one": [1, 2]}
    assert (broken["outcome"], broken["held"], broken["exit_code"]) == ("failed", 1, -6)
    assert broken["output"].startswith("the last words\n")
    assert (hung["outcome"], hung["limit"]) == ("timeout", 200)
    (child,) = (one["value"] for one in lines if one.get("fact") == "child")
    assert not runs(child)
    assert (passed["outcome"], passed["wrong"]) == ("passed", {})
    assert summary["summary"] == {"failed": ["failing", "breaking"], "timeout": ["hanging"], "passed": ["passing"]}
    assert lines[lines.index(hung) + 1 : lines.index(passed)] == [  # as they were made
        {"check": "passing", "fact": "device", "value": "cpu"},
        {"check": "passing", "row": "table", "value": {"width": 1.0}},
        {"check": "passing", "held": "true", "value": None},
        {"check": "passing", "skipped": "a part", "value": "no reason"},
    ]


def test_a_check_that_is_killed_as_it_writes_leaves_the_others_lines_whole(tmp_path):
    lines = tmp_path / "lines"
    assert run([planted(cut_off), planted(passing)], CPU, 1000, lines) == 1
    cut, *others = lines.read_text().splitlines()
    assert cut == '{"check": "cut_off", "fac'
    assert [json.loads(line)["check"] for line in others[:-1]] == ["cut_off"] + 5 * ["passing"]
    assert list(findings(lines, "passing", "fact")) == [("device", "cpu")]


def test_the_budget_holds_for_all_checks_together(monkeypatch, tmp_path):
    """By a clock that only checks advance, each by all that it may take; a second is kept for its end."""
    now, limits = [0.0], []

    def take_all(check: Planned, place: Place, limit: float, lines: Path) -> dict[str, Any]:
        limits.append(limit)
        now[0] += limit
        return {"outcome": "timeout"}

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(runner, "_run_one", take_all)
    checks = [planted(hanging, 4), planted(failing, 8), planted(passing, 1)]
    assert run(checks, CPU, 7, tmp_path / "lines") == 2
    *_, unreached, summary = lines_of(tmp_path / "lines")
    assert limits == [4, 2]
    assert unreached == {"check": "passing", "outcome": "unreached", "seconds_left": 0}
    assert summary["summary"] == {"timeout": ["hanging", "failing"], "unreached": ["passing"]}


def test_the_checks_are_whole_and_can_be_listed():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    command = [sys.executable, "-m", "checks.gpu", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in listed.splitlines()] == names
    for check in CHECKS:
        assert callable(getattr(import_module(check.module), check.function)), check.name
    files = {path.stem for path in (ROOT / "checks/gpu/checks").glob("*.py")} - {"__init__"}
    assert {check.module.rpartition(".")[2] for check in CHECKS} == files
    page = (ROOT / "docs/reference/gpu-checks.md").read_text()
    assert re.findall(r"(?m)^\| (\d) \| `(\w+)` \|", page) == [(str(check.call), check.name) for check in CHECKS]


def test_the_two_calls_on_a_lent_machine_fill_its_quarter_of_an_hour():
    """900 s, with 90 for its start and 20 to install wheels; one command may run for 600."""
    assert BUDGETS[1] + BUDGETS[2] + 90 + 20 <= 900
    assert BUDGETS[1] + 20 <= 600
    for call in (1, 2):
        assert sum(check.limit for check in CHECKS if check.call == call) == BUDGETS[call]
    assert {check.call for check in CHECKS} == BUDGETS.keys()


def test_numbers_are_rounded_and_nan_is_a_string():
    assert plain({1: (0.123456, float("nan"), None, True)}) == {"1": [0.1235, "nan", None, True]}


# ---- profiles


def test_a_trace_has_kernels_by_kind_launches_and_idle_time():
    """Names as CUPTI has given them. 8 ms: 1 … 3 and 2 … 4 overlap, 5 … 7 has a gap before it and one of 2 after it."""
    from checks.gpu.trace import Trace  # imports PyTorch, which the planted checks here don't need

    def event(name: str, start: float, ms: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": 1e6 + 1e3 * start, "dur": 1e3 * ms}

    trace = Trace.read(
        [
            event("nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT", 1, 2),
            event("backward_queries", 2, 2),
            event("forward_0", 5, 1),
            event("triton_red_fused__log_softmax_2", 6, 0.5),
            event("Memcpy DtoD (Device -> Device)", 6.5, 0.5, "gpu_memcpy"),
            event("triton_poi_fused_add_mul_1", 9, 0),
            event("cudaLaunchKernel", 0, 0.01, "cuda_runtime"),
            event("cuLaunchKernelEx", 0, 0.01, "cuda_driver"),
            event("cudaGraphLaunch", 0, 0.01, "cuda_runtime"),
            event("cudaStreamSynchronize", 0, 9, "cuda_runtime"),
            event("aten::mm", 0, 9, "cpu_op"),
            {"ph": "M", "name": "process_name"},
        ],
        cuda=True,
    )
    assert (trace.launches, trace.graph_launches, trace.waits) == (2, 1, 1)
    assert (trace.busy, trace.length) == (5, 8)
    kinds = {"attention": (3, 2), "products": (2, 1), "loss": (0.5, 1), "copies": (0.5, 1)}
    assert trace.sums(lambda one: one.kind) == {**kinds, "norms and elementwise": (0, 1)}
    assert trace.sums(lambda one: one.ours or "others") == {
        "others": (3, 4),
        "backward_queries": (2, 1),
        "forward": (1, 1),
    }
    assert (Trace.read([], cuda=True).busy, Trace.read([], cuda=True).length) == (0, 0)


KINDS = {
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "copies",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorList>": "optimizer",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<c10::BFloat16, unsigned int>": "copies",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "products",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "norms and elementwise",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>": "loss",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel": "other",
}


def test_kernels_are_of_a_kind_by_their_names():
    from checks.gpu.trace import Kernel

    assert {name: Kernel(name, 0, 1).kind for name in KINDS} == KINDS


def test_the_kernels_that_are_looked_for_are_those_of_this_project(tmp_path):
    """In T5 v1.1 base, 128 rows of 12 heads with 2 products of 2 · 512 · 512 · 64 in 10 ms are 10.3 TFLOP/s."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    from checks.gpu.checks.attention import TIMES, Form, tell
    from checks.gpu.trace import OURS, Kernel, Trace
    from pretrain.models.kernels import flash

    assert {name for name, one in vars(flash).items() if getattr(one, "__module__", "") == flash.__name__} == {*OURS}
    kernels = [Kernel(name, 10 * number, 10 * number + 10) for number, name in enumerate(TIMES * OURS)]
    report = Report("attention", tmp_path / "lines", tmp_path, "cuda")
    tell(report, "encoder", Trace(kernels, 0, 0, 0), Form(512, 512, biased=True, causal=False))
    rows = [value for _, value in findings(tmp_path / "lines", "attention", "row")]
    assert {row["kernel"]: (row["ms"], row["tflops"]) for row in rows} == {
        "forward": (10, 10.31),
        "backward_queries": (10, 15.46),
        "backward_keys": (10, 20.62),
    }


# ---- what a bare machine needs

FROM_NO_WHEEL = "langdetect,mlflow,ray,scipy,xdist"
FROM_WHEELS = "brotli,fasttext,punkt,pycld2,rensa,resiliparse,zlib_ng,zstandard"  # for tests of the third call
ABSENT = {1: f"{FROM_NO_WHEEL},{FROM_WHEELS}", 2: f"{FROM_NO_WHEEL},{FROM_WHEELS}", 3: FROM_NO_WHEEL}  # by call


# The quicker tests that do the same work on a CPU, some of it by the same functions of tests/support. The check `run`,
# which isn't among them, has `launch local` start a rank and start it again where the modules are absent.
DONE_BY_TESTS = {
    "runs": "tests/launch/test_supervision.py",
    "kernels": "tests/pretrain/models/test_kernels.py",
    "checkpoints": "tests/pretrain/engine/test_checkpoints.py",
    "device_tests": "tests/pretrain/models/test_loss_head.py",
}


def run_small(checks: list[Planned], lines: Path) -> None:
    bad = run([replace(check, limit=900) for check in checks], CPU, 3600, lines)
    assert bad == 0, [one for one in lines_of(lines) if one.get("outcome", "passed") != "passed"]


@pytest.mark.slow
def test_every_check_runs_on_a_cpu_without_a_library_of_the_data_pipeline_and_without_mlflow(monkeypatch, tmp_path):
    """As on a machine that is lent: what it is to run has run before, small, but for the few lines that need a GPU, and
    for those of DONE_BY_TESTS."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'checks/gpu/hooks'}{os.pathsep}{ROOT}")
    for calls in ((3,), (1, 2)):
        monkeypatch.setenv("ABSENT_MODULES", ABSENT[calls[0]])
        run_small([one for one in CHECKS if one.call in calls and one.name not in DONE_BY_TESTS], tmp_path / "lines")
    from checks.results import gpu  # imports PyTorch

    of_page = {name: len(rows) for name, _, rows in gpu.tables(lines_of(tmp_path / "lines"))}  # of the last two calls
    assert of_page.keys() == {"checks", *gpu.SOURCES} - {"flex"}  # its times are a GPU's
    assert (of_page["checks"], of_page["peers"], of_page["launches"]) == (7, 4, 3)
    modules = ["launch.attempts", "pretrain.cli", *sorted({check.module for check in CHECKS}), "ray"]
    command = [sys.executable, "-c", "\n".join(f"import {module}" for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'ray'"  # the last of them


@pytest.mark.soak
@pytest.mark.parametrize("name", DONE_BY_TESTS)
def test_checks_of_what_tests_see_run_on_a_cpu(name, monkeypatch, tmp_path):
    assert (ROOT / DONE_BY_TESTS[name]).exists()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'checks/gpu/hooks'}{os.pathsep}{ROOT}")
    (check,) = (one for one in CHECKS if one.name == name)
    monkeypatch.setenv("ABSENT_MODULES", ABSENT[check.call])
    run_small([check], tmp_path / "lines")


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
