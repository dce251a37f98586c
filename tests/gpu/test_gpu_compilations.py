"""The limits of `make gpu` hold on a machine that has compiled nothing: they follow from counted compilations."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.gpu.checks import CHECKS
from tests.gpu.report import Report
from tests.gpu.runner import FIXED_TILES, Planned, seconds_to_compile

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pretrain.kernels import compilation, tuning
from tests.gpu.workload import pass_through
from tests.slow import slow


class _CountedError(Exception):
    pass


class Counting(Report):
    """A report "on a GPU" that counts the kernels of a check, whose tensors are on the CPU, and ends it there."""

    def __init__(self, folder: Path):
        super().__init__(folder / "notes", folder, "cpu", small=False)
        self.count = 0

    cuda = True  # type: ignore[assignment]

    def compile_ahead(self, launches) -> None:
        self.count = len(compilation.requests(launches))
        raise _CountedError


@pytest.fixture(autouse=True)
def h100(monkeypatch) -> None:
    """Triton and this project believe in an H100; tensors are on the CPU."""
    monkeypatch.setattr(driver, "_active", compilation._Driver(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(compilation._Driver, "get_current_stream", lambda *_: 0, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


RUNS = [one for one in CHECKS if one.compilations and one.module.endswith(".runs")]
IN_PROCESS = [one for one in CHECKS if one.compilations and one not in RUNS]


@pytest.mark.parametrize("check", slow(*IN_PROCESS), ids=lambda one: one.name)
def test_compilations_are_as_many_as_counted(check: Planned, monkeypatch, tmp_path):
    if not check.tuned:
        monkeypatch.setenv(FIXED_TILES, "1")
    report = Counting(tmp_path)
    with pytest.raises(_CountedError):
        getattr(import_module(check.module), check.function)(report)
    assert report.count == check.compilations


@pytest.mark.parametrize("check", RUNS, ids=lambda one: one.name)
def test_those_of_runs_are_as_many_as_their_model_needs(check: Planned, monkeypatch, tmp_path):
    """They train with rows with padding and without, and `auto_micro_batch` with the model of `throughput`."""
    from tests.gpu.checks.runs import SMALL

    if not check.tuned:
        monkeypatch.setenv(FIXED_TILES, "1")
    model = {**SMALL, "d_kv": 64 if check.tuned else SMALL["d_kv"]}
    found = compilation.requests(lambda: pass_through(model, torch.device("cpu"), 64, 32))
    assert len(found) == check.compilations


def test_the_environment_is_the_tuners():
    assert tuning.FIXED == FIXED_TILES


def test_a_limit_has_room_for_compilations_on_a_gpu_alone():
    check = Planned("name", "module", "function", 60.0, compilations=40)
    assert check.limit_on("cpu") == 60.0
    assert check.limit_on("cuda") > 60.0 + 40 * 1.4 / 128
    assert seconds_to_compile(17, 8) - seconds_to_compile(16, 8) == pytest.approx(1.4)
