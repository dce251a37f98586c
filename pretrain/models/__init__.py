"""Model families, each reading like its paper.

Nothing here imports torch before `build` or `outline` is called: a run file is validated in milliseconds.
"""

from pretrain.config.models import (
    AnyModelConfig,
    AutoregressiveConfig,
    BartConfig,
    DecoderOnlyConfig,
    DoubleDecoderConfig,
    EncoderOnlyConfig,
    ModelConfig,
    ModernConfig,
    T5Config,
    T5Gemma2Config,
    T5GemmaConfig,
    VanillaConfig,
)
from pretrain.models.families import FAMILIES, Family, build, outline, parse

__all__ = [
    "FAMILIES",
    "AnyModelConfig",
    "AutoregressiveConfig",
    "BartConfig",
    "DecoderOnlyConfig",
    "DoubleDecoderConfig",
    "EncoderOnlyConfig",
    "Family",
    "ModelConfig",
    "ModernConfig",
    "T5Config",
    "T5Gemma2Config",
    "T5GemmaConfig",
    "VanillaConfig",
    "build",
    "outline",
    "parse",
]
