"""Model families, each reading like its paper.

Nothing here imports torch before `build` or `outline` is called: a run file is validated in milliseconds.
"""

from pretrain.models.config import (
    AutoregressiveConfig,
    BartConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    T5Config,
    VanillaConfig,
)
from pretrain.models.families import FAMILIES, AnyModelConfig, Family, build, outline, parse

__all__ = [
    "FAMILIES",
    "AnyModelConfig",
    "AutoregressiveConfig",
    "BartConfig",
    "DecoderOnlyConfig",
    "EncoderOnlyConfig",
    "Family",
    "ModelConfig",
    "T5Config",
    "VanillaConfig",
    "build",
    "outline",
    "parse",
]
