"""The Typer application, and what several commands share: arguments."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import Version, config_path, path_argument

HELP = "Train models on corpora; evaluate them, generate text with them, export and track them."
app = typer.Typer(no_args_is_help=True, add_completion=False, help=HELP, pretty_exceptions_enable=False)

RunPath = Annotated[Path, path_argument("RUN.yaml", "The run file. Its keys: docs/reference/settings.md.", config_path)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys that override the run file: optimizer.learning_rate=1e-3"),
]
Checkpoint = Annotated[Path, path_argument("CHECKPOINT", "A checkpoint, or a run directory: its latest checkpoint.")]
SavedModel = Annotated[
    Path,
    path_argument(
        "CHECKPOINT", "A checkpoint, a run directory (its latest checkpoint), or a model that transformers saved."
    ),
]
NewDirectory = Annotated[Path, path_argument("OUT", "The directory to write; it must not exist.")]


@app.callback(help=HELP, epilog="Example: pretrain train configs/runs/quickstart.yaml run.max_steps=100")
def _started_by_a_launcher(
    version: Version = False, local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None
) -> None:
    # the deepspeed launcher passes --local_rank to each rank; the environment holds the same number
    pass
