"""The commands answer at once: slow imports happen only where they are needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.tools.doctor import checks
from tests.conftest import run
from tests.support.rank_processes import PRELOADED
from tests.support.runs import run_file
from tests.support.tables import each

HOOKS = Path(__file__).parents[2] / "checks/gpu/hooks"  # makes modules absent in every Python process


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """From here on, a process that imports one of these modules fails."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOOKS), *sys.path[1:]]))
    monkeypatch.setenv("ABSENT_MODULES", ",".join(modules))


def test_the_launcher_works_without_torch_and_ray(small_corpus, tmp_path, monkeypatch):
    path = run_file(tmp_path, small_corpus)
    without(monkeypatch, "torch", "ray", "deepspeed")
    done = run("launch", "slurm", path, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    without(monkeypatch, "ray", "deepspeed")
    text = ("--text", HOOKS.parent / "checks/*.py", "--format", "text")
    done = run("launch", "init", "mine", *text, "--model", "t5gemma2-1.2m", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


SLOW = ("numpy", "pyarrow", "pydantic", "omegaconf", "fsspec", "torch", "ray", "mlflow", "deepspeed", "psutil")


@each("command", ["data-pipeline", "pretrain", "launch"])
def test_help_and_version_import_nothing_that_only_work_needs(monkeypatch, command):
    without(monkeypatch, *SLOW)
    assert run(command, "--help").returncode == 0
    done = run(command, "--version")
    assert (done.returncode, done.stdout[:18]) == (0, "encdec-pretrain 0.")


@each("command", ["data-pipeline verify", "data-pipeline build", "pretrain train", "pretrain export", "launch slurm"])
def test_help_of_a_command_and_a_mistyped_option_import_nothing_that_only_work_needs(monkeypatch, command):
    without(monkeypatch, *(name for name in SLOW if name != "pydantic"))  # with which typer parses
    assert run(*command.split(), "--help").returncode == 0
    done = run(*command.split(), "--nope")
    assert (done.returncode, "No such option: --nope" in done.stderr) == (2, True)


@each("searching", [True, False])
def test_imports_are_searched_for_garbage_once(searching):
    code = f"""
import gc

from data_pipeline.base.processes import importing

if not {searching}:
    gc.disable()
searched = []
gc.callbacks.append(lambda phase, found: searched.append(phase))
with importing():
    assert not gc.isenabled()
    import argparse
assert gc.isenabled() is {searching}
assert searched == ["start", "stop"]
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_deepspeed_which_chooses_its_accelerator_then_is_imported_in_the_process_group():
    code = "import sys, pretrain.training.run; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_servers_that_processes_are_forked_from_never_touch_a_gpu():
    """CUDA can't be used in a process whose parent has used it before the fork. The first server makes ranks of tests,
    the second the processes of loaders."""
    code = f"""
import importlib, sys
import torch

def touched(*_):
    print("touched", flush=True)
    sys.exit(1)

torch.cuda._lazy_init = touched
if not torch.cuda._nvml_based_avail():  # else PyTorch asks the driver's management library, which initialises nothing
    torch.cuda.is_available = torch.cuda.device_count = touched
for name in {[*PRELOADED, "data_pipeline.loading.batches"]}:
    importlib.import_module(name)
print("touched" if torch.cuda.is_initialized() else "not touched")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "not touched", done.stderr


def test_doctor_names_a_package_that_a_check_lacks(monkeypatch):
    without(monkeypatch, "torch")
    request = {checks.REQUEST: json.dumps(["rank", {}]), "RANK": "0"}
    command = [sys.executable, "-m", checks.__name__]
    done = subprocess.run(command, env={**os.environ, **request}, capture_output=True, text=True)
    (finding,) = json.loads(done.stdout.removeprefix(checks.REPORT))
    assert finding["found"] == "rank 0: the check failed: No module named 'torch'"
