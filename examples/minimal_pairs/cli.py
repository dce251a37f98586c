"""`python -m examples.minimal_pairs CHECKPOINT DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from pretrain.cli.app import Checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m examples.minimal_pairs runs/babylm/t5gemma2/seed-0 blimp/data --limit 50")
def _minimal_pairs(
    checkpoint: Checkpoint,
    directory: Annotated[Path, path_argument("DIR", "A folder of minimal pairs such as BLiMP's.")],
    form: Annotated[
        str | None,
        typer.Option(help="Prompt format: answer, blank or copy. Default: that of the training."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of pairs per paradigm.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that a rank evaluates at once.")] = 8,
    out: Annotated[Path | None, path_option("--out", "A directory for minimal_pairs.json.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the metrics as a JSON object.")] = False,
) -> None:
    """Tell how often a checkpoint prefers the acceptable sentence of two, on one rank or those of a launcher."""
    from examples.minimal_pairs.pairs import score_checkpoint  # PyTorch takes 2 s
    from pretrain.engine.checkpoint.index import checkpoint_in

    score_checkpoint(checkpoint_in(checkpoint), directory, form, limit, batch_size, out, json_)


def main() -> None:
    run_command(app)
