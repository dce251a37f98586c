"""`python -m examples.import_yan FILE GPT2_DIR OUT`."""

from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.base.command import path_argument, run_command
from pretrain.cli.app import NewDirectory

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m examples.import_yan ckpt.pt gpt2 start")
def _import_yan(
    file: Annotated[Path, path_argument("FILE", "A checkpoint of Yan's code.")],
    tokenizer: Annotated[Path, path_argument("GPT2_DIR", "A directory with GPT-2's encoder.json and vocab.bpe.")],
    out: NewDirectory,
) -> None:
    """Convert a checkpoint of Yan's code to a checkpoint that a run can start from."""
    from examples.import_yan.checkpoint import import_yan  # PyTorch takes 2 s

    config = import_yan(file, tokenizer, out)
    print(f"{out}: a {config.family} with {config.vocab_size:,} ids.")
    print(f"Next: pretrain train RUN.yaml checkpoint.init_from={out}")


def main() -> None:
    run_command(app)
