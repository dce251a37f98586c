"""Writes run files, runs them as users do, and reads the results."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.engine.ranks import joined_world
from pretrain.run.metrics_file import FILE_NAME, read_metrics, rows_from
from tests.conftest import TOP
from tests.support.forked import run_forked
from tests.support.rank_processes import on_ranks

MODEL = {
    "family": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dropout_rate": 0.1,
}


def run_file(
    folder: Path, corpus: Path | str, stage: int = 2, run: dict[str, object] | None = None, **changes: object
) -> Path:
    """A run file in `folder`; `run` changes keys of that section, `changes` whole sections."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "run": {"name": "test", "directory": str(folder / "run"), "max_steps": 8, "cpu_threads": 1, **(run or {})},
        "model": MODEL,
        "data": {"train": [{"corpus": str(corpus)}], "validation": [{"corpus": str(corpus)}], "lanes": 8, "workers": 0},
        "batch": {"global_batch_size": 16, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1, "gradient_clipping": 0.5},
        "schedule": {"name": "cosine", "warmup_steps": 3},
        "precision": "fp32",
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "checkpoint": {"every_steps": 4, "keep_last": 2},
        "evaluation": [{"hook": "validation_loss", "every_steps": 8}],
        "tracking": {"mlflow": None, "log_every_steps": 1},
        **changes,
    }
    path = folder / "run.yaml"
    write_json(path, config)  # whole at any moment, since each rank of a test may write it and read it
    return path


def mlflow(folder: Path) -> dict[str, object]:
    """The tracking section of a run in MLflow. Few tests need it: `empty_mlflow` saves the seconds for its tables."""
    return {"mlflow": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "tests"}, "log_every_steps": 1}


def train_ranks(path: Path, ranks: int, *overrides: str, stop: int | None = None, fresh: bool = False) -> list[int]:
    """Runs ranks without a launcher, which takes half the time to start; returns their exit codes."""
    return on_ranks(ranks, _train, path, overrides, stop, fresh, joined=False)


def _train(path: Path, overrides: tuple[str, ...], stop: int | None, fresh: bool) -> int:
    from pretrain.training.run import train

    return train(load(path, list(overrides), RunConfig), stop, fresh)


def train_each(ranks: int, starts: list[tuple[Path, int | None]]) -> list[list[int]]:
    """Trains each run up to a step, or to its end, in the same processes; returns the exit codes of each rank."""
    return on_ranks(ranks, _train_each, starts)


def _train_each(starts: list[tuple[Path, int | None]]) -> list[int]:
    from pretrain.training.run import train_in_group

    world = joined_world()
    return [train_in_group(world, load(path, [], RunConfig), stop) for path, stop in starts]


def train(path: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Starts a run of one rank as users do; it must end with this exit code."""
    done = run_forked("train", path, *arguments)
    assert done.returncode == code, done.stderr
    return done


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, offered: dict[str, dict[str, str]]) -> None:
    """The package in `folder`, as pip install -e does, for the processes that are started afterwards."""
    written = folder / f"{name}-1.0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{one} = {value}\n" for one, value in offered[group].items()) for group in offered
    ]
    (written / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def install_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Installs the package that a page of docs shows; returns the settings on the page that use it."""
    page = (TOP / f"docs/{name}.md").read_text()
    for file, code in re.findall(r"```\w+\n# ([\w./]+)(?::[^\n]*)?\n(.*?)```", page, re.DOTALL):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(code)
    project: dict[str, Any] = {}  # a callback needs none
    if (folder / "pyproject.toml").exists():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(monkeypatch, folder, "my_package", project.get("entry-points", {}))
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(settings)
    return found


def losses(path: Path) -> dict[int, float]:
    rows = read_metrics(path.parent / "run")
    return {row.step: row.metrics["train/loss"] for row in rows if "train/loss" in row.metrics}


def steps_taken(directory: Path) -> list[int]:
    """The steps that a run has logged, with those that it took twice: `read_metrics` merges them."""
    return [row.step for row, _ in rows_from(directory / FILE_NAME) if "train/loss" in row.metrics]
