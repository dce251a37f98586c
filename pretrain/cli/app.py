"""The Typer application, and what several commands share: arguments, and how a checkpoint is opened."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from data_pipeline.base.command import Version, config_path, path_argument

if TYPE_CHECKING:
    from pretrain.engine.checkpoint.trained import TrainedModel

Options = TypeVar("Options")

HELP = "Train models on corpora; evaluate them, generate text with them, export and track them."
app = typer.Typer(no_args_is_help=True, add_completion=False, help=HELP, pretty_exceptions_enable=False)

RunPath = Annotated[Path, path_argument("RUN.yaml", "The run file. `pretrain reference` shows its keys.", config_path)]
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


def takes(options: type[Options]) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """Gives a command the fields of the dataclass `options` as its arguments and options, as typer reads parameters."""

    def decorate(command: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            command(context, options(**given))

        own = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        fields = inspect.signature(options).parameters.values()
        run.__annotations__ = {one.name: one.annotation for one in (own, *fields)}
        run.__signature__ = inspect.Signature([own, *fields])  # type: ignore[attr-defined]
        return run

    return decorate


def open_checkpoint(path: Path) -> "TrainedModel":
    """The model of a checkpoint, of the latest in a run directory, or of a directory that transformers saved."""
    from pretrain import loaded  # PyTorch takes 2 s and 200 MB; --help does without

    return loaded.open_model(path)
