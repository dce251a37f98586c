"""The settings of Adafactor."""

import math
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from pretrain.config.optimizers.optimizer import FP32, Kind, OptimizerConfig

_COUNT = 8  # bytes of an int64
_CONSTANT = "gone; leave it out: it is the paper's constant, {}"


class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018), as in T5: without momentum."""

    implementation: ClassVar[str] = "pretrain.engine.optimizers.adafactor.Adafactor"
    step_bytes: ClassVar[int] = 2 * FP32
    gone = {
        "decay_rate": ([0.8], _CONSTANT.format("0.8")),
        "clipping_threshold": ([1.0], _CONSTANT.format("1.0")),
        "eps": ([[1e-30, 1e-3], (1e-30, 1e-3)], _CONSTANT.format("1e-30 and 1e-3")),
    }

    name: Literal["adafactor"] = "adafactor"
    min_dim_size_to_factor: PositiveInt = 128
    """A matrix with fewer rows or columns than this keeps unfactored second moments, one per element."""
    multiply_by_parameter_scale: bool = True
    """Scale updates by each tensor's RMS."""

    def factors(self, shape: tuple[int, ...]) -> bool:
        """True if a parameter of this shape has one second moment for each row and column, not for each element."""
        return len(shape) == 2 and min(shape) >= self.min_dim_size_to_factor

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        return 0

    def whole_state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """The second moments, and the number of elements that each is the mean of."""
        return (FP32 + _COUNT) * (sum(shape) if self.factors(shape) else math.prod(shape))

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "min_dim_size_to_factor": self.min_dim_size_to_factor}

    def width_exponent(self, kind: Kind) -> float:
        """Scaled updates shrink with a matrix's RMS, m^-½, already."""
        return (0.5 if self.multiply_by_parameter_scale else 1.0) if kind == "matrices" else 0.0
