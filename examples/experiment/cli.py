"""`python -m examples.experiment DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base import progress
from data_pipeline.base.command import config_path, path_argument, path_option, run_command
from pretrain.cli.app import Overrides

_MOST_RUNS = 1000  # of a row, or at the same time
AtOnce = Annotated[
    int | None,
    typer.Option(min=1, max=_MOST_RUNS, help="Number of runs to train at the same time. Default: one per GPU, or one."),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m examples.experiment configs:experiments/adaptation --seeds 3 --budget 5%")
def _experiment(
    directory: Annotated[
        Path, path_argument("DIR", "A folder of run files, or configs:NAME for a shipped one.", config_path)
    ],
    overrides: Overrides = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_RUNS, help="Number of runs of each file, with the seeds run.seed, run.seed + 1, …"
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
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="ROW", help="The row that the others are compared with. Default: `baseline`, else the first."
        ),
    ] = None,
) -> None:
    """Train every run file of a folder with several seeds, and compare the runs in a table.

    The same command resumes: finished runs are kept, interrupted runs continue. If a run fails, the others
    continue.
    """
    with progress.activity_shown("reading the run files"):
        from examples.experiment import run_experiment  # PyTorch takes 2 s, MLflow more

        code = run_experiment.experiment(directory, seeds, budget, at_once, out, overrides or [], train, baseline)
    raise typer.Exit(code)


def main() -> None:
    run_command(app)
