"""The schema of run files: `RunConfig` and its sections."""

from pretrain.config.run_config import RunConfig

__all__ = ["RunConfig"]
