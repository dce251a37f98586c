"""Model families, each reading like its paper.

Nothing here imports torch before `build` is called: a run file is validated in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pretrain.models.config import (
    AutoregressiveConfig,
    BartConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    T5Config,
    VanillaConfig,
)

if TYPE_CHECKING:
    from pretrain.models.model import Model

# family: (its config, where its module lives)
FAMILIES: dict[str, tuple[type[ModelConfig], str]] = {
    "autoregressive": (AutoregressiveConfig, "pretrain.models.autoregressive.Autoregressive"),
    "t5": (T5Config, "pretrain.models.t5.T5"),
    "bart": (BartConfig, "pretrain.models.bart.Bart"),
    "vanilla": (VanillaConfig, "pretrain.models.vanilla.Vanilla"),
    "decoder_only": (DecoderOnlyConfig, "pretrain.models.decoder_only.DecoderOnly"),
    "encoder_only": (EncoderOnlyConfig, "pretrain.models.encoder_only.EncoderOnly"),
}


def build(config: ModelConfig) -> Model:
    """The freshly initialised model that `config` describes; torch's generator decides the weights."""
    module, name = FAMILIES[config.family][1].rsplit(".", 1)
    return getattr(import_module(module), name)(config)


__all__ = [
    "FAMILIES",
    "AutoregressiveConfig",
    "BartConfig",
    "DecoderOnlyConfig",
    "EncoderOnlyConfig",
    "ModelConfig",
    "T5Config",
    "VanillaConfig",
    "build",
]
