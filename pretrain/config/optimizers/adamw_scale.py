"""The settings of AdamWScale."""

import math
from typing import ClassVar, Literal

from pydantic import PositiveFloat

from pretrain.config.optimizers.optimizer import FP32, Decay, Kind, OptimizerConfig


class AdamWScaleConfig(OptimizerConfig):
    """nanoT5's optimizer (Nawrot 2023): AdamW with updates scaled by each tensor's root mean square (RMS)."""

    implementation: ClassVar[str] = "pretrain.engine.optimizers.adamw_scale.AdamWScale"
    gone = {"least_rms": ([1e-3], "gone; updates are scaled by an RMS of 0.001 or more, nanoT5's constant")}
    step_bytes: ClassVar[int] = 4 * FP32  # the update, each element's factor, and an int64 index

    name: Literal["adamw_scale"] = "adamw_scale"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-6
    """Added to the square root of the second moment."""

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """Two moments."""
        return 2 * FP32 * math.prod(shape)

    def width_exponent(self, kind: Kind) -> float:
        """Scaled updates shrink with a matrix's RMS, m^-½, already."""
        return 0.5 if kind == "matrices" else 0.0
