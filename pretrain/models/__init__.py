"""Model families, each reading like its paper.

Nothing here imports torch before `build` or `outline` is called: a run file is validated in milliseconds.
"""

from pretrain.models.config.autoregressive import AutoregressiveConfig
from pretrain.models.config.bart import BartConfig
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.decoder_only import DecoderOnlyConfig
from pretrain.models.config.double_decoder import DoubleDecoderConfig
from pretrain.models.config.encoder_only import EncoderOnlyConfig
from pretrain.models.config.modern import ModernConfig
from pretrain.models.config.t5 import T5Config
from pretrain.models.config.t5gemma import T5Gemma2Config, T5GemmaConfig
from pretrain.models.config.vanilla import VanillaConfig
from pretrain.models.families import FAMILIES, AnyModelConfig, Family, build, outline, parse

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
