"""Commands that show a run."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import path_argument, path_option
from pretrain.cli.app import app


@app.command(epilog="Example: pretrain dashboard runs/quickstart --port 5001")
def dashboard(
    run_dir: Annotated[Path | None, path_argument("RUN_DIR", "Show the charts of this run.")] = None,
    uri: Annotated[
        str, path_option("--uri", "MLflow's store, if no run is given.", paths.mlflow_uri)
    ] = "sqlite:///runs/mlflow.db",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Another free one is taken if it is in use.")] = 5000,
) -> None:
    """Serve the MLflow UI until Ctrl-C."""
    from pretrain.tracking.dashboard import dashboard as serve

    serve(run_dir, uri, port)


@app.command(epilog="Example: pretrain watch runs/quickstart")
def watch(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, as it is now.")] = False,
) -> None:
    """Show a run's curves and samples in the terminal, until Ctrl-C."""
    from pretrain.tools.watch import watch as show

    show(run_dir, once)


@app.command(epilog="Example: pretrain picture runs/quickstart")
def picture(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    out: Annotated[Path | None, path_option("--out", "A PNG file. Default: RUN_DIR/picture.png.")] = None,
) -> None:
    """Draw a run's held-out loss, and what its decoder attends to in the input."""
    from pretrain.trainer.picture import draw

    draw(run_dir, target := out or run_dir / "picture.png")
    print(target)


@app.command(epilog="Example: pretrain sync runs/quickstart --uri http://mlflow.example.org:5000")
def sync(
    run_dir: Annotated[Path, path_argument("RUN_DIR", "A run directory.")],
    uri: Annotated[str | None, path_option("--uri", "Another MLflow than the run's own.", paths.mlflow_uri)] = None,
) -> None:
    """Send MLflow the metrics and files of a run that it lacks."""
    from pretrain.tracking.tracker import sync as feed

    print(f"{run_dir}: {feed(run_dir, uri)} metrics sent. Next: pretrain dashboard {run_dir}")
