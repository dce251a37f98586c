"""The command `pretrain`: trains models on corpora, and generates with, exports and tracks them."""

from data_pipeline.foundation.command import run_command

# in the order of the help
from pretrain.cli import runs, generate, checkpoints  # noqa: F401  # isort: skip
from pretrain.cli.app import app


def main() -> None:
    run_command(app)


__all__ = ["app", "main"]
