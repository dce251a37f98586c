"""The Typer application, and what several commands share: arguments."""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from data_pipeline.base import packages
from data_pipeline.base.command import Version, config_path, path_argument
from data_pipeline.base.errors import UserError

HELP = "Train models on corpora; evaluate them, generate text with them, export and track them."
_MODULES = {  # of this package, by command, in the order of the help
    **dict.fromkeys(("train", "plan", "dashboard", "runs", "picture", "sync"), "runs"),
    "experiment": "experiment",
    "generate": "generate",
    **dict.fromkeys(("evaluate", "export", "average", "import", "adapt"), "checkpoints"),
}


class _Commands(Mapping[str, Any]):
    """The commands by name: those that ship, then those of installed packages, whose entry points
    `encdec_pretrain.commands` name a Typer application each.

    A command's module, which has the Typer application `commands` if it ships, is imported when the command is looked
    up. Iterating gives those that ship, since the help, which lists them, would import the packages of all others.
    Raises UserError for the command of a package in `examples` that isn't installed, and as `packages.by_name`.
    """

    @cached_property
    def _offered(self) -> dict[str, EntryPoint]:
        return packages.by_name("commands", _MODULES)

    def __getitem__(self, name: str) -> Any:
        if name in _MODULES:
            found = typer.main.get_command(import_module(f"pretrain.cli.{_MODULES[name]}").commands)
            return found.commands[name] if isinstance(found, TyperGroup) else found
        if name in self._offered:
            return typer.main.get_command(packages.imported(self._offered[name]))
        if packages.example("commands", name):
            raise UserError(packages.missing("commands", name))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(TyperGroup):
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands = cast(MutableMapping[str, Any], _Commands())


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, help=HELP, pretty_exceptions_enable=False)

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
