"""The command `pretrain`: it trains, evaluates, exports and tracks models, and generates text with them."""

from data_pipeline.base.command import run_command
from pretrain.cli.app import app


def main() -> None:
    run_command(app)


__all__ = ["app", "main"]
