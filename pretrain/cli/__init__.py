"""The command `pretrain`: it trains, evaluates, exports and tracks models, and generates text with them."""

from data_pipeline.base.command import run_command

# in the order of the help
from pretrain.cli import runs, experiment, generate, checkpoints  # noqa: F401  # isort: skip
from pretrain.cli.app import app


def main() -> None:
    run_command(app)


__all__ = ["app", "main"]
