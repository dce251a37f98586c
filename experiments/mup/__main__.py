"""`python -m experiments.mup RUN.yaml`."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_option, run_command
from experiments.mup.run_mup_check import mup_check
from pretrain.cli.app import Overrides, RunPath

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m experiments.mup configs/runs/quickstart.yaml --widths 64,128,256")
def _mup_check(
    config: RunPath,
    overrides: Overrides = None,
    widths: Annotated[
        str | None,
        typer.Option(help="At least three widths: 64,128,256,512. Default: doublings of the least possible."),
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "Where table and picture go. Default: runs/mup-check-NAME.")
    ] = None,
) -> None:
    """Check on a CPU that activations and the best learning rate stay the same over widths (exit code 1 if not)."""
    raise typer.Exit(mup_check(config, overrides or [], widths, out))


run_command(app)
