"""The settings of AdamW."""

import math
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from pretrain.config.optimizers.optimizer import FP32, Decay, Kind, OptimizerConfig


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019)."""

    implementation: ClassVar[str] = "pretrain.engine.optimizers.adamw.adamw"

    name: Literal["adamw"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """Two moments."""
        return 2 * FP32 * math.prod(shape)
