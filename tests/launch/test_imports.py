"""The commands answer at once: slow imports happen only where they are needed."""

import subprocess
import sys

import pytest

from tests.conftest import run


def imported(code: str, *modules: str) -> list[str]:
    """The modules among `modules` that the program `code` has imported."""
    code = f"import sys; {code}; print(*(name for name in {modules} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()  # DeepSpeed's import may print lines before it


def test_the_launcher_imports_neither_torch_nor_ray():
    assert imported("import launch.cli, launch.local", "torch", "ray", "deepspeed") == []


def test_help_imports_nothing_that_only_work_needs():
    slow = ("numpy", "pyarrow", "pydantic", "omegaconf", "fsspec", "http.client", "torch", "ray", "mlflow", "psutil")
    assert imported("import data_pipeline.cli, pretrain.cli, launch.cli", *slow) == []


@pytest.mark.parametrize("command", ["data-pipeline", "pretrain", "launch"])
def test_every_command_has_a_version(command):
    done = run(command, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("encdec-pretrain 0.")


def test_neither_a_rank_nor_deepspeeds_launcher_imports_mlflow_with_deepspeed():
    assert imported("import pretrain.zero.engine", "deepspeed", "mlflow") == ["deepspeed"]
    assert imported("import launch.node_launcher", "deepspeed", "mlflow") == ["deepspeed"]
