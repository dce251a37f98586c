"""What a run file may say under `model:`, one class for each family. No torch: the launcher reads these too."""

from typing import Annotated

from pydantic import Field

from pretrain.models.config.autoregressive import AutoregressiveConfig
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.t5 import T5Config
from pretrain.models.config.transformer import BartConfig, VanillaConfig

AnyModelConfig = Annotated[AutoregressiveConfig | BartConfig | T5Config | VanillaConfig, Field(discriminator="family")]

__all__ = ["AnyModelConfig", "AutoregressiveConfig", "BartConfig", "ModelConfig", "T5Config", "VanillaConfig"]
