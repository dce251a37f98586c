"""The command that trains the run files of a folder and compares them."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base import progress
from data_pipeline.base.command import config_path, path_argument, path_option
from pretrain.cli.app import Overrides
from pretrain.tools.experiment import MOST_RUNS

commands = typer.Typer(add_completion=False)
AtOnce = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_RUNS, help="Number of runs to train at the same time. Default: one per GPU, or one."),
]


@commands.command(
    "experiment", epilog="Example: pretrain experiment configs:experiments/adaptation --seeds 3 --budget 5%"
)
def experiment_command(
    directory: Annotated[
        Path, path_argument("DIR", "A folder of run files, or configs:NAME for a shipped one.", config_path)
    ],
    overrides: Overrides = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_RUNS, help="Number of runs of each file, with the seeds run.seed, run.seed + 1, …"
        ),
    ] = 3,
    budget: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="Length of each run, and so of its schedule: 400steps, 5% or 2e13flops."),
    ] = None,
    at_once: AtOnce = None,
    out: Annotated[
        Path | None,
        path_option("--out", "Directory for the runs and the table. Default: runs/NAME, with the budget in its name."),
    ] = None,
    train: Annotated[
        bool, typer.Option(help="Train the runs. --no-train: only make the table of finished runs.")
    ] = True,
) -> None:
    """Train every run file of a folder with several seeds, and compare the runs in a table.

    The same command resumes: finished runs are kept, interrupted runs continue. If a run fails, the others
    continue.
    """
    with progress.activity_shown("reading the run files"):
        from pretrain.tools.experiment import run_experiment  # PyTorch takes 2 s, MLflow more

        outcome = run_experiment.experiment(directory, seeds, budget, at_once, out, overrides or [], train)
    raise typer.Exit(outcome.code)
