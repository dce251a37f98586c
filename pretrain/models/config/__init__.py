"""What a run file may say under `model:`, one class for each family. No torch: the launcher reads these too."""

from typing import Annotated

from pydantic import Field

from pretrain.models.config.autoregressive import AutoregressiveConfig
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.t5 import T5Config

AnyModelConfig = Annotated[AutoregressiveConfig | T5Config, Field(discriminator="family")]

__all__ = ["AnyModelConfig", "AutoregressiveConfig", "ModelConfig", "T5Config"]
