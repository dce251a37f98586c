"""The folder of an experiment: run files, which are its rows, experiment.yaml, which says how to compare them, and the
runs that these give: which run file, with which seed, where, and how long by the experiment's budget.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from data_pipeline.base.atomic import write_json
from data_pipeline.base.config_file import Section, load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import masked_values
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.base.processes import PYTHON
from pretrain.config import RunConfig
from pretrain.run import status
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from pretrain.training.throughput import flops_per_step

FILE = "experiment.yaml"
_BASELINE = "baseline"  # a row
_NAME = re.compile(r"[\w.-]+")


class Group(Section):
    """Rows that are compared with one of them."""

    title: str
    """The group's question, above its rows in the table."""
    baseline: str
    """The row that the others are compared with."""
    rows: Annotated[list[str], Field(min_length=1)]
    """The names of run files without .yaml, in the order of the table. A row may stand in several groups."""
    metric: str | None = None
    """The metric that rows are compared by, under its own name: `infilling/NAME/bits_per_byte`. null: the validation
    loss."""

    @model_validator(mode="after")
    def _baseline_is_a_row(self) -> "Group":
        if self.baseline not in self.rows:
            raise ValueError(f"baseline: {self.baseline} is none of the rows {', '.join(self.rows)}")
        return self


class ExperimentFile(Section):
    """The file experiment.yaml in a folder of run files: how their runs are compared, and with what."""

    name: str | None = None
    """The experiment's name, above the table and in the default of `--out`. null: the folder's name."""
    groups: list[Group] = []
    """Which rows are compared. Rows in no group are compared with the row `baseline`, else with the first."""


@dataclass(frozen=True)
class Experiment:
    """`rows`: the run files by name: first the rows of groups, in their order."""

    name: str
    rows: dict[str, Path]
    groups: list[Group]


def read(directory: Path) -> Experiment:
    """The experiment in `directory`. Raises UserError, which names the file and the key, if it can't be run."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; expected one with run files")
    settings = load(directory / FILE, [], ExperimentFile) if (directory / FILE).exists() else ExperimentFile()
    files = {path.stem: path for path in sorted(directory.glob("*.yaml")) if path.name != FILE}
    if not files:
        raise UserError(f"{directory}: no run file (*.yaml) there")
    name, groups = settings.name or directory.resolve().name, list(settings.groups)
    grouped = dict.fromkeys(row for group in groups for row in group.rows)
    problems = [f"{FILE}: {row}.yaml isn't in the folder" for row in grouped if row not in files]
    problems += [f"{one!r}: expected letters, digits, - and ." for one in (name, *files) if not _NAME.fullmatch(one)]
    if problems:
        raise UserError("\n".join(f"{directory}: {problem}" for problem in problems))
    others = [row for row in files if row not in grouped]
    if others:
        first = _BASELINE if _BASELINE in others else others[0]
        others.sort(key=lambda row: row != first)  # stable
        groups.append(Group(title="Other rows" if groups else name, baseline=first, rows=others))
    return Experiment(name, {row: files[row] for row in (*grouped, *others)}, groups)


_FILE = "overrides.json"
_BUDGET = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)(steps?|%|flops)", re.I)
_SMALLEST = 50  # steps: with fewer, whole steps miss the FLOPs by more than 1 %


@dataclass(frozen=True)
class PlannedRun:
    """One run of the experiment. `launcher`: the command that trains it."""

    row: str
    seed: int
    launcher: tuple[str, ...]
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
        config, settings = load(file, overrides, RunConfig), list(overrides)
        if threads and config.run.cpu_threads is None:
            settings.append(f"run.cpu_threads={threads}")
        for seed in range(config.run.seed, config.run.seed + seeds):
            directory = json.dumps(str(out / row / f"seed-{seed}"))
            all_ = (*settings, f"run.name={row}-seed-{seed}", f"run.directory={directory}", f"run.seed={seed}")
            launcher = (*PYTHON, "-u", "-m", "launch", "local", str(file), *all_)
            runs.append(PlannedRun(row, seed, launcher, load(file, all_, RunConfig)))
    _check_overrides(out, {row: list(overrides) for row, (_, overrides) in rows.items()})
    return sorted(runs, key=lambda run: run.seed)  # stable


def _check_overrides(out: Path, rows: dict[str, list[str]]) -> None:
    """A run can't resume with other overrides than it was started with."""
    before = read_valid_json(out / _FILE, dict[str, list[str]]) or {}
    changed = [row for row, settings in rows.items() if before.get(row, settings) != settings and (out / row).exists()]
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
    raise UserError(f"--budget: {budget!r}; expected a number of steps (400steps), a share (5%) or FLOPs (2e13flops)")


def of_length(config: RunConfig, steps: int) -> list[str]:
    """The overrides that give the run of `config` a length of `steps`, and every number of steps in its file in
    proportion.

    These are warm-up and decay, the ramp of the batch size, the curriculum, the frozen steps, and the steps from one
    evaluation, checkpoint and line of metrics to the next. A number of steps stays at least 1, and what came after
    another step still does: 3 and 4 of 100 steps become 1 and 2 of 10. Widths, batches, learning rates and data stay as
    they are.
    """
    share = steps / config.run.max_steps

    def shorter(value: int) -> int:
        return max(1, round(share * value))

    lengths = _schedule(config, steps, share)
    if freeze := config.optimizer.freeze:
        lengths["optimizer.freeze.until_step"] = shorter(freeze.until_step)
    ends = {
        "batch.ramp_up": [ramp.until_step for ramp in config.batch.ramp_up],
        "data.curriculum": [stage.until_step for stage in config.data.curriculum],
    }
    for key, untils in ends.items():
        end = 0
        for number, until in enumerate(untils):
            end = lengths[f"{key}.{number}.until_step"] = max(shorter(until), end + 1)
    for number, hook in enumerate(config.evaluation):
        lengths[f"evaluation.{number}.every_steps"] = shorter(hook.every_steps)
    save_steps, keep_steps = config.checkpoint.every_steps, config.checkpoint.keep_every_steps
    lengths["checkpoint.every_steps"] = every = shorter(save_steps)
    if keep_steps:  # only what is saved is kept
        lengths["checkpoint.keep_every_steps"] = every * max(1, round(keep_steps / save_steps))
    lengths["tracking.log_every_steps"] = shorter(config.tracking.log_every_steps)
    return [f"{key}={value}" for key, value in {**lengths, "run.max_steps": steps}.items()]


def _schedule(config: RunConfig, steps: int, share: float) -> dict[str, int]:
    """The steps of the schedule in a run of `steps`, by key. A decay begins where the warm-up has ended, or later."""
    schedule, lengths = config.schedule, {}
    warmup = max(1, round(share * schedule.warmup_steps)) if schedule.warmup_steps else 0
    if until := getattr(schedule, "until_step", None):
        lengths["schedule.until_step"] = max(warmup + 1, round(share * until))
    if decay := getattr(schedule, "decay_steps", None):
        begin = max(warmup, round(share * (config.run.max_steps - decay)))
        lengths["schedule.decay_steps"] = max(1, steps - begin)
        warmup = min(warmup, steps - 1)
    return lengths | ({"schedule.warmup_steps": warmup} if schedule.warmup_steps else {})


def _steps_of_flops(config: RunConfig, flops: float) -> int:
    # The weights that a run starts from need not be there: they don't change its arithmetic.
    alone = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"init_from": None})})
    steps = round(flops / flops_per_step(prepare(alone, World.on_this_node())))
    if steps < _SMALLEST:
        raise UserError(f"--budget: {flops:g} FLOPs are {steps} steps of {config.run.name}; {_SMALLEST} at least")
    return steps
