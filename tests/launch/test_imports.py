"""The commands answer at once: slow imports happen only where they are needed."""

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_pipeline.foundation.absent_modules import absent
from tests.conftest import run
from tests.pretrain.rank_processes import PRELOADED


def imported(code: str, *modules: str) -> list[str]:
    """The modules among `modules` that the program `code` has imported."""
    code = f"import sys; {code}; print(*(name for name in {modules} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()  # DeepSpeed's import may print lines before it


def test_the_launcher_imports_neither_torch_nor_ray():
    modules = "launch.cli, launch.local, launch.tools.scaffold.files, data_pipeline.tokenizer.training"
    assert imported(f"import {modules}, pretrain.run.cpu_speed", "torch", "ray", "deepspeed") == []


def test_help_imports_nothing_that_only_work_needs():
    slow = ("numpy", "pyarrow", "pydantic", "omegaconf", "fsspec", "http.client", "torch", "ray", "mlflow", "psutil")
    assert imported("import data_pipeline.cli, pretrain.cli, launch.cli", *slow) == []


@pytest.mark.parametrize("command", ["data-pipeline", "pretrain", "launch"])
def test_every_command_has_a_version(command):
    done = run(command, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("encdec-pretrain 0.")


def test_a_rank_imports_deepspeed_but_neither_mlflow_nor_the_compiler():
    assert imported("import pretrain.zero.engine", "deepspeed", "mlflow", "torch._dynamo") == ["deepspeed"]


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


def test_deepspeeds_launcher_starts_without_the_rest_of_deepspeed():
    code = "import launch.node_launcher; launch.node_launcher.launcher()"
    assert imported(code, "torch", "deepspeed.runtime", "deepspeed.launcher.launch") == ["deepspeed.launcher.launch"]


def test_a_hidden_module_is_hidden_within_the_block_and_from_this_thread_alone():
    def found() -> bool:
        try:
            return importlib.import_module("colorsys") is not None
        except ModuleNotFoundError:
            return False

    sys.modules.pop("colorsys", None)
    with absent("colorsys"):
        assert not found()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(found).result()
        assert found()  # it is loaded now
    sys.modules.pop("colorsys")
    assert found()
