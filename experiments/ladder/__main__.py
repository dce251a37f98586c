"""`python -m experiments.ladder LADDER.yaml`."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import config_path, path_argument, path_option, run_command
from experiments.ladder.run_ladder import ladder
from pretrain.cli.app import Overrides
from pretrain.cli.experiment import AtOnce

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m experiments.ladder experiments/ladder/t5-wikipedia-c4.yaml --next")
def _ladder(
    config: Annotated[
        Path,
        path_argument("LADDER.yaml", "A ladder file: experiments/ladder/enwik8-record.yaml, …", config_path),
    ],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each rung, with seeds from run.seed on.")] = 1,
    at_once: AtOnce = None,
    out: Annotated[Path | None, path_option("--out", "Where runs and table go. Default: runs/NAME.")] = None,
    train: Annotated[bool, typer.Option(help="Train; or only fit the rungs that have finished.")] = True,
    next_: Annotated[bool, typer.Option("--next", help="Train the next rung too, and compare it.")] = False,
    against: Annotated[
        Path | None,
        path_option("--against", "The ladder.json of another recipe: how much compute it needs for the same losses."),
    ] = None,
) -> None:
    """Train models of growing size, fit a law to their losses, and predict the next size's.

    Resumable: finished runs are kept, interrupted ones continue. A run that fails doesn't end the others.
    """
    raise typer.Exit(ladder(config, seeds, at_once, out, overrides or [], train, next_, against))


run_command(app)
