"""The command `launch`: starts runs on one machine."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.foundation import paths
from data_pipeline.foundation.command import Version, config_argument, path_option, run_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.callback()
def _commands(version: Version = False) -> None:
    """Start and supervise training runs."""


@app.command()
def local(
    config: Annotated[Path, config_argument("RUN.yaml", "The run file. `pretrain reference` shows its keys.")],
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


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the files, the corpus and the run.")] = "first",
    model: Annotated[str, typer.Option(metavar="NAME", help="A file of configs/models.")] = "t5-v1.1-small",
    text: Annotated[
        str | None, path_option("--text", "Text: a path, glob or URL. Default: what ships.", paths.location)
    ] = None,
    text_format: Annotated[
        str | None, typer.Option("--format", help="Of --text: text, jsonl, parquet, … Default: by its name.")
    ] = None,
    corpus: Annotated[
        str | None, path_option("--corpus", "Train on this finished corpus: no corpus file.", paths.location)
    ] = None,
) -> None:
    """Write a first corpus file and run file into the current folder. Existing files stay as they are."""
    from launch.first_files import write_first_files

    corpus_file, run_file = write_first_files(name, model, text, text_format, corpus)
    print(f"wrote {f'{corpus_file} and ' if corpus_file else ''}{run_file}. Next:")
    print(f"  data-pipeline {f'build {corpus_file}' if corpus_file else f'show {shlex.quote(str(corpus))}'}")
    print(f"  launch local {run_file}")


def main() -> None:
    run_command(app)
