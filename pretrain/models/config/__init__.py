"""The `model:` section of a run file: one class per family. The launcher reads these too, so torch isn't imported."""

from pretrain.models.config.autoregressive import AutoregressiveConfig
from pretrain.models.config.bart import BartConfig
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.decoder_only import DecoderOnlyConfig
from pretrain.models.config.encoder_only import EncoderOnlyConfig
from pretrain.models.config.t5 import T5Config
from pretrain.models.config.vanilla import VanillaConfig

__all__ = [
    "AutoregressiveConfig",
    "BartConfig",
    "DecoderOnlyConfig",
    "EncoderOnlyConfig",
    "ModelConfig",
    "T5Config",
    "VanillaConfig",
]
