"""Runs with each optimizer that write checkpoints, and damage to the files of those."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.base.atomic import fingerprint, sha256
from pretrain.config import RunConfig
from pretrain.engine.ranks import joined_world
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import run_file

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": 1e-3, "weight_decay": 0.1},
    "adamw_scale": {"learning_rate": 1e-2},
    "adafactor": {"learning_rate": 1e-2, "min_dim_size_to_factor": 16},
    "muon": {"learning_rate": 1e-3, "newton_schulz_dtype": "fp32"},
}
STEPS = 12


def config(folder: Path, corpus: Path, optimizer: str, stage: int) -> RunConfig:
    path = run_file(
        folder / optimizer,
        corpus,
        stage,
        run={"name": optimizer, "max_steps": STEPS},
        batch={"global_batch_size": 16, "micro_batch_size": 2},
        optimizer={"name": optimizer, "gradient_clipping": 0.5, **OPTIMIZERS[optimizer]},
        checkpoint={"every_steps": 3, "keep_last": 9},
        evaluation=[],
    )
    return RunConfig.model_validate(json.loads(path.read_text()))


def trained(ranks: int, folder: Path, corpus: Path, stage: int, stop: int | None) -> list[list[int]]:
    """Trains with each of `OPTIMIZERS` up to step `stop`; returns the exit codes on each rank."""
    runs = [(folder, config(folder, corpus, optimizer, stage), stop) for optimizer in OPTIMIZERS]
    return on_ranks(ranks, each, _recorded_training, runs, seconds=280)


def _recorded_training(folder: Path, settings: RunConfig, stop: int | None) -> int:
    """The exit code of a run on the ranks that have joined, which write down the rows that they take."""
    from pretrain.engine.engine import Engine
    from pretrain.training.run import train_in_group
    from tests.support.recorded import record_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORDED_ROWS", str(folder / settings.optimizer.name))
        patch.setattr(Engine, "step", Engine.step)  # so that it is as before after this run
        record_steps(Engine)
        return train_in_group(joined_world(), settings, stop)


def flip(path: Path) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file of a checkpoint and corrects every checksum, so that no sha256 reveals the change."""
    values = json.loads(path.read_text())
    change(values)
    values.pop("checksum", None)
    if path.name == "index.json":
        values["checksum"] = fingerprint(values)
    path.write_text(json.dumps(values))
    if path.name != "index.json":
        describe(path)


def describe(path: Path) -> None:
    """Puts a file's size and checksum into the index."""
    content = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    rewrite(path.with_name("index.json"), lambda values: values["files"].update({path.name: content}))
