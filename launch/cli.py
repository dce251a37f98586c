"""The command `launch`: starts runs on one machine."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation.command import Version, path_argument, run_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.callback()
def _commands(version: Version = False) -> None:
    """Start and supervise training runs."""


@app.command()
def local(
    config: Annotated[Path, path_argument("RUN.yaml", "The run file. `pretrain reference` shows its keys.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: one per GPU, or one.")] = None,
    stop_at_step: Annotated[
        int | None, typer.Option(min=1, help="Save and stop (exit code 75) after this step.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run; the existing one is moved aside.")] = False,
) -> None:
    """Start or resume a run on this machine through the deepspeed launcher.

    The first Ctrl-C, SIGTERM or SIGUSR1 makes the run save and stop (exit code 75); the second kills it.
    """
    from launch.local import launch_local

    raise typer.Exit(launch_local(config, overrides or [], ranks, stop_at_step, fresh))


def main() -> None:
    run_command(app)
