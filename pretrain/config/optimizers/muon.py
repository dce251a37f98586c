"""The settings of Muon."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.config.optimizers.optimizer import FP32, Decay, Kind, OptimizerConfig


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) for matrices, AdamW for all other parameters, with `betas`, `eps` and
    `adamw_learning_rate`."""

    implementation: ClassVar[str] = "pretrain.engine.optimizers.muon.Muon"
    step_bytes: ClassVar[int] = 3 * FP32

    name: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton–Schulz iterations, which orthogonalize an update."""
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    """The dtype of the Newton–Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How an orthogonalized update is scaled. `match_rms_adamw`: by 0.2 · √(larger dimension) (Liu et al. 2025), so
    that one learning rate suits matrices and all other parameters. `original`: by √(rows / columns) if that exceeds
    1."""
    adamw_learning_rate: PositiveFloat | None = None
    """Peak learning rate of AdamW. null: `learning_rate`, which suits only with `match_rms_adamw`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the square root of the second moment."""

    @model_validator(mode="after")
    def _rates_suit(self) -> Self:
        if self.adjust_lr_fn == "original" and self.adamw_learning_rate is None:
            raise ValueError("adjust_lr_fn: original needs an adamw_learning_rate: learning_rate suits matrices only")
        return self

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """The momentum of a matrix, AdamW's two moments of any other parameter."""
        return (1 if kind == "matrices" else 2) * FP32 * math.prod(shape)

    def without_bf16(self) -> Self:
        return self.model_copy(update={"newton_schulz_dtype": "fp32"})

    def algorithm(self, kind: Kind) -> str:
        return "muon" if kind == "matrices" else "adamw"

    def rate(self, kind: Kind) -> float:
        return self.learning_rate if kind == "matrices" else self.adamw_learning_rate or self.learning_rate

    def width_exponent(self, kind: Kind) -> float:
        """An orthogonalized update has singular values of 1, right at any width; 0.2 · √(larger dimension) grows as
        m^½."""
        return 0.5 if kind == "matrices" and self.adjust_lr_fn == "match_rms_adamw" else 0.0

    def change_exponent(self, kind: Kind) -> float:
        """An orthogonalized update of n × n has elements of n^-½, times `width_exponent` and its scale."""
        return 0.5 if kind == "matrices" else 0.0
