"""The settings of Lion: the section `optimizer` of a run file. This module doesn't import torch."""

import math
from typing import ClassVar, Literal

from pretrain.config.optimizers.optimizer import FP32, Decay, Kind, OptimizerConfig


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023): each element of an update is the learning rate, with the sign of a moving average of
    gradients.

    Take a learning rate 3 to 10 times as small as AdamW's, and a weight decay as many times as large.
    """

    implementation: ClassVar[str] = "lion.lion.Lion"
    step_bytes: ClassVar[int] = FP32  # the signs

    name: Literal["lion"] = "lion"
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """The weight of the momentum in an update, and the decay rate of the momentum."""

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """The momentum."""
        return FP32 * math.prod(shape)
