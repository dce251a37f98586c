"""The runs of an experiment: which run file, with which seed, where, and how long by the experiment's budget."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import masked_values
from data_pipeline.foundation.json_file import read_valid_json
from pretrain.config import RunConfig
from pretrain.run import status
from pretrain.tools.experiment.experiment_file import Experiment
from pretrain.trainer.throughput import flops_per_step
from pretrain.trainer.validate import validate

_FILE = "overrides.json"
_BUDGET = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)(steps?|%|flops)", re.I)
_SMALLEST = 50  # steps: with fewer, whole steps miss the FLOPs by more than 1 %


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


def shortened(config: RunConfig, budget: str) -> list[str]:
    """The overrides that give the run of `config` the length of `budget`: "400steps", "5%" of its steps or "2e13flops".
    Raises UserError for anything else."""
    match = _BUDGET.fullmatch(budget.replace(" ", ""))
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if unit == "flops" and number:
        return of_length(config, _steps_of_flops(config, number))
    if unit == "%" and 0 < number <= 100:
        return of_length(config, max(1, round(number / 100 * config.run.max_steps)))
    if unit.startswith("step") and number and number.is_integer():
        return of_length(config, int(number))
    raise UserError(
        f"--budget: {budget!r}; expected a number of steps, such as 400steps, a share, such as 5%, or FLOPs, "
        "such as 2e13flops"
    )


def of_length(config: RunConfig, steps: int) -> list[str]:
    """The overrides that give the run of `config` a length of `steps`, and every number of steps in its file in
    proportion.

    These are warm-up and decay, the ramp of the batch size, the curriculum, and the steps from one evaluation,
    checkpoint and line of metrics to the next. A number of steps stays at least 1. Widths, batches, learning rates and
    data stay as they are.
    """
    share = steps / config.run.max_steps
    lengths = {key: max(1, round(share * value)) for key, value in _lengths(config) if value}
    return [f"{key}={value}" for key, value in {**lengths, "run.max_steps": steps}.items()]


def _steps_of_flops(config: RunConfig, flops: float) -> int:
    # The weights that a run starts from may come from another run of the experiment, which isn't there yet.
    alone = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"init_from": None})})
    steps = round(flops / flops_per_step(validate(alone, 0, 1)))
    if steps < _SMALLEST:
        raise UserError(f"--budget: {flops:g} FLOPs are {steps} steps of {config.run.name}; {_SMALLEST} at least")
    return steps


def _lengths(config: RunConfig) -> Iterator[tuple[str, int | None]]:
    """Every key of a run file that counts steps of the run, with its value."""
    for key in ("warmup_steps", "until_step", "decay_steps"):
        yield f"schedule.{key}", getattr(config.schedule, key, None)
    for number, ramp in enumerate(config.batch.ramp_up):
        yield f"batch.ramp_up.{number}.until_step", ramp.until_step
    for number, stage in enumerate(config.data.curriculum):
        yield f"data.curriculum.{number}.until_step", stage.until_step
    for number, hook in enumerate(config.evaluation):
        yield f"evaluation.{number}.every_steps", hook.every_steps
    yield "checkpoint.every_steps", config.checkpoint.every_steps
    yield "checkpoint.keep_every_steps", config.checkpoint.keep_every_steps
    yield "tracking.log_every_steps", config.tracking.log_every_steps
