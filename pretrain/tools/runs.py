"""`pretrain runs`: a table of the runs below a folder, from the files of their directories alone."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import duration
from pretrain.run import metrics_file, rank_environment, restarts, status

_LOSS, _SPEED = "train/loss", "train/tokens_per_second"
_ONCE = re.compile(r" --(fresh|stop-at-step[ =]\d+)(?= |$)")  # would start the run anew, or stop it again
_ENDED = {"finished": "green", "failed": "red", "died": "red"}


@dataclass(frozen=True)
class RunRow:
    """A run in the table. What a run's files don't tell is None, or "" for text.

    Attributes:
        job: the id of the SLURM job of the last attempt.
        step: the last logged step. `max_steps`: the number of steps to train.
        loss: the last logged training loss, nats per token.
        tokens_per_second: the last logged speed.
        seconds_left: the time for the remaining steps at the speed of the last logged steps; None unless it trains.
        resume: the command that resumes the run, without --fresh and --stop-at-step; "" if the run has finished or
            trains, or if its directory was renamed, as by --fresh.
    """

    directory: Path
    state: str
    job: str
    step: int | None
    max_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    resume: str


def find(folder: Path) -> Iterator[Path]:
    """The run directories in `folder` and below, sorted by path. Nothing is searched inside a run."""
    for path, folders, files in os.walk(folder):
        folders[:] = [] if status.STATUS in files else sorted(name for name in folders if not name.startswith("."))
        if status.STATUS in files:
            yield Path(path)


def row(run: Path) -> RunRow:
    """The run in the directory `run`."""
    state, start = restarts.state(run).state, rank_environment.last_started_by(run)
    logged = [one for one in metrics_file.last_rows(run / metrics_file.FILE_NAME) if _LOSS in one.metrics]
    last, (most, directory) = logged[-1] if logged else None, _settings(run)
    renamed = directory is not None and Path(directory).name != run.absolute().name
    seconds = None
    if last and most and state == "running":
        first = next(one for one in logged if one.attempt == last.attempt)
        if last.step > first.step:
            seconds = (most - last.step) * (last.time - first.time) / (last.step - first.step)
    return RunRow(
        directory=run,
        state=state,
        job=start.job,
        step=last.step if last else None,
        max_steps=most,
        loss=last.metrics[_LOSS] if last else None,
        tokens_per_second=last.metrics.get(_SPEED) if last else None,
        seconds_left=seconds,
        resume="" if renamed or state in ("running", "finished") else _ONCE.sub("", start.command),
    )


def _settings(run: Path) -> tuple[int | None, str | None]:
    """`run.max_steps` and `run.directory` of a run's config.yaml; None: the file doesn't tell."""
    try:
        config = OmegaConf.load(run / "config.yaml")
        steps, directory = (OmegaConf.select(config, f"run.{key}") for key in ("max_steps", "directory"))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None, None
    return steps if isinstance(steps, int) else None, directory if isinstance(directory, str) else None


def runs(folder: Path, as_json: bool = False, console: Console | None = None) -> None:
    """Prints the table of the runs in `folder` and below, then the commands that resume runs.

    `as_json`: prints a list of objects with the attributes of RunRow instead. Raises UserError if there is no run.
    """
    rows = [row(run) for run in find(folder)]
    if not rows:
        raise UserError(f"{folder}: no runs here; give a run directory, or a folder of run directories")
    if as_json:
        print(json.dumps([{**vars(one), "directory": str(one.directory)} for one in rows], indent=1))
        return
    table = Table("run", "state", "job", box=None, pad_edge=False)
    for name in ("step", "loss", "tokens/s", "left"):
        table.add_column(name, justify="right")
    for one in rows:
        steps = f"{one.step or 0:,}" + (f"/{one.max_steps:,}" if one.max_steps else "")
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        speed = "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}"
        left = "" if one.seconds_left is None else duration(one.seconds_left)
        texts = map(Text, (str(one.directory), one.state, one.job, steps, loss, speed, left))  # brackets are no markup
        table.add_row(*texts, style=_ENDED.get(one.state))
    console = console or Console()
    console.print(table)
    for one in rows:
        if one.resume:
            console.print(Text(f"resume {one.directory}: {one.resume}"), style="dim", soft_wrap=True)
