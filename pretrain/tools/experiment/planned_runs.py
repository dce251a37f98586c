"""The runs of an experiment: which run file, with which seed, where."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.foundation.secrets import masked_values
from pretrain.config import RunConfig
from pretrain.run import status
from pretrain.tools.experiment.budget import shortened
from pretrain.tools.experiment.experiment_file import Experiment

_FILE = "overrides.json"


@dataclass(frozen=True)
class PlannedRun:
    """One run of the experiment. `overrides` are those of the command line of its launcher."""

    row: str
    seed: int
    file: Path
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def directory(self) -> Path:
        return Path(self.config.run.directory)

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def log(self) -> Path:
        """The output of its launcher."""
        return self.directory.with_name(f"{self.directory.name}.log")

    def follows(self, other: "PlannedRun") -> bool:
        """True if it starts from weights of the other run."""
        start = self.config.checkpoint.init_from
        return start is not None and Path(start).absolute().is_relative_to(other.directory.absolute())

    @property
    def finished(self) -> bool:
        now = status.read(self.directory)
        return now.state == "finished" and (now.step or 0) >= self.config.run.max_steps


def plan_experiment(
    experiment: Experiment, seeds: int, budget: str | None, overrides: Sequence[str], out: Path, threads: int | None
) -> list[PlannedRun]:
    """The runs of an experiment's rows, shortened to the budget; see `plan_runs`."""
    rows = {}
    for name, file in experiment.rows.items():
        shorter = shortened(load(file, overrides, RunConfig), budget) if budget else ()
        rows[name] = (file, [*overrides, *shorter])
    return plan_runs(rows, seeds, out, threads)


def plan_runs(
    rows: Mapping[str, tuple[Path, Sequence[str]]], seeds: int, out: Path, threads: int | None
) -> list[PlannedRun]:
    """The runs of `rows`, each a run file and its overrides, in OUT/ROW/seed-N.

    They come seed by seed, so that all rows have one run before any has two. Seeds count from `run.seed` of a file.

    `threads`: CPU threads of a run whose file doesn't set them. Raises UserError for a wrong run file, and if `out`
    holds runs of a row with other overrides.
    """
    runs = []
    for row, (file, overrides) in rows.items():
        config, given = load(file, overrides, RunConfig), list(overrides)
        if threads and config.run.cpu_threads is None:
            given.append(f"run.cpu_threads={threads}")
        if config.tracking.mlflow:
            given.append(f"tracking.mlflow.parent={out.name}")
        for seed in range(config.run.seed, config.run.seed + seeds):
            directory = json.dumps(str(out / row / f"seed-{seed}"))
            all_ = (*given, f"run.name={row}-seed-{seed}", f"run.directory={directory}", f"run.seed={seed}")
            runs.append(PlannedRun(row, seed, file, all_, load(file, all_, RunConfig)))
    _check_overrides(out, {row: list(overrides) for row, (_, overrides) in rows.items()})
    return sorted(runs, key=lambda run: run.seed)  # stable


def _check_overrides(out: Path, rows: dict[str, list[str]]) -> None:
    """A run can't go on with other overrides than it was started with."""
    before = read_valid_json(out / _FILE, dict[str, list[str]]) or {}
    changed = [row for row, given in rows.items() if before.get(row, given) != given and (out / row).exists()]
    if changed:
        raise UserError(
            f"{out}: has runs of {', '.join(changed)} with other settings or steps; give the same, or another --out"
        )
    rows = before | rows
    write_json(out / _FILE, rows, mode=None if masked_values(rows) == rows else 0o600)
