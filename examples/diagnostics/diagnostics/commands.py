"""The command `pretrain attention`. What its work needs is imported when it runs, not for its help."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_option
from pretrain.cli.app import SavedModel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: pretrain attention runs/quickstart 'The <extra_id_0> is red.'")
def attention(
    checkpoint: SavedModel,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The model's input; it may have <extra_id_0> … .")],
    target: Annotated[str | None, typer.Option(help="The decoder's input. Default: the model's answer.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens on an axis.")] = 40,
    out: Annotated[Path | None, path_option("--out", "The directory for the pictures. Default: attention.")] = None,
) -> None:
    """Draw the attention weights of each layer and head."""
    from diagnostics.attention import draw_attention  # torch takes seconds
    from pretrain import loaded

    trained = loaded.open_model(checkpoint).on_best_device()
    for path in draw_attention(trained, text, target, tokens, out or Path("attention")):
        print(path)
