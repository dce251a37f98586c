"""The run file: `RunConfig` with its sections, those of evaluations, and the keys that DeepSpeed gets."""

from pretrain.config.run_config import RunConfig

__all__ = ["RunConfig"]
