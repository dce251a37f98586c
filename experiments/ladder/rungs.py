"""The rungs of a ladder as runs: their parameters, steps, tokens and arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from experiments.ladder.ladder_file import LadderFile, Rung
from pretrain import models
from pretrain.config import RunConfig
from pretrain.run.world import World
from pretrain.tools.experiment.experiment_folder import PlannedRun, of_length, plan_runs
from pretrain.training.prepare import PreparedRun, prepare
from pretrain.training.throughput import flops_per_step, rows_per_step


@dataclass(frozen=True)
class SizedRung:
    """A rung with its run's length. `tokens` are tokens of text, `flops` those of the training, forward and backward.

    `rows_per_step` and `tokens_per_row` are means. `epochs`: how often it reads the text. `overrides`: of the run file,
    with those that set the length.
    """

    name: str
    parameters: int
    steps: int
    rows_per_step: float
    tokens_per_row: float
    tokens: float
    flops: float
    epochs: float
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Ladder:
    """`rungs` in order of size, and the rung to predict. `run`: the run file."""

    name: str
    file: LadderFile
    run: Path
    rungs: list[SizedRung]
    next: SizedRung

    @property
    def all(self) -> list[SizedRung]:
        return [*self.rungs, self.next]


def sized(path: Path, file: LadderFile, run: Path, overrides: Sequence[str]) -> Ladder:
    """Opens the corpora and counts. Raises UserError, a line for each rung that can't be run, and for equal sizes."""
    setups: list[PreparedRun] = []
    wrong: dict[str, list[str]] = {}  # rungs, by what is wrong with them
    for key, rung in [*((f"rungs.{number}", rung) for number, rung in enumerate(file.rungs)), ("next", file.next)]:
        try:
            setups.append(prepare(load(run, [*overrides, *rung.overrides], RunConfig), World.on_this_node()))
        except UserError as error:
            name = f"{key} ({rung.name})"
            wrong |= {line: [*wrong.get(line, []), name] for line in str(error).splitlines()}
    problems = [f"{path}: {', '.join(names)}: {line}" for line, names in wrong.items()]
    if problems:
        raise UserError("\n".join(problems))
    found = [
        _sized(rung, setup, overrides, file.tokens_per_parameter) for rung, setup in zip(file.all, setups, strict=True)
    ]
    *rungs, following = found
    by_size: dict[int, list[str]] = {}
    for one in found:
        by_size.setdefault(one.parameters, []).append(one.name)
    problems = [
        f"{path}: {' and '.join(names)} have {parameters:,} parameters each; a rung is a size"
        for parameters, names in by_size.items()
        if len(names) > 1
    ]
    rungs.sort(key=lambda rung: rung.parameters)
    if not problems and following.parameters < rungs[-1].parameters:
        problems.append(f"{path}: next ({following.name}): smaller than {rungs[-1].name}; the next rung is the largest")
    if problems:
        raise UserError("\n".join(problems))
    return Ladder(file.name or path.stem, file, run, rungs, following)


def _tokens_per_row(setup: PreparedRun) -> float:
    """Tokens of text, before any noise, in a training row: what the corpora's manifests count, by the run's mixture."""
    means = [corpus.manifest.splits["train"].tokens / corpus.rows("train") for corpus in setup.training]
    return sum(share * mean for (_, share), mean in zip(setup.shares, means, strict=True))


def _sized(rung: Rung, setup: PreparedRun, overrides: Sequence[str], tokens_per_parameter: float) -> SizedRung:
    parameters, config = models.meta_model(setup.model).num_parameters(), setup.config
    of_step, tokens_per_row = rows_per_step(config), _tokens_per_row(setup)
    steps = max(1, round(tokens_per_parameter * parameters / tokens_per_row / of_step))
    rows = steps * of_step
    flops = steps * flops_per_step(setup)  # of the run file's own length, whose curriculum is shortened in proportion
    text = sum(corpus.rows("train") for corpus in setup.training)
    length = of_length(config, steps)
    given = (*overrides, *rung.overrides, *length)
    return SizedRung(
        rung.name, parameters, steps, of_step, tokens_per_row, rows * tokens_per_row, flops, rows / text, given
    )


def planned_runs(ladder: Ladder, seeds: int, out: Path, threads: int | None) -> list[PlannedRun]:
    """The runs of all rungs, the smallest first. Raises UserError if `out` holds runs of one with other settings."""
    return plan_runs({rung.name: (ladder.run, rung.overrides) for rung in ladder.all}, seeds, out, threads)
