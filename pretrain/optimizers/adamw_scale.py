"""AdamWScale, nanoT5's optimizer (Nawrot 2023, section 3): AdamW with steps relative to the size of each tensor."""

from typing import Any

import torch
from torch import Tensor

from pretrain.optimizers.config import AdamWScaleConfig
from pretrain.optimizers.flat import Flat, Span
from pretrain.optimizers.sharded import Sharded, root_mean_squares, subtract, sums_of_squares


class AdamWScale(Sharded):
    """Step t with gradient g, for each tensor p with moments m and v:

        p ← (1 − rate · decay) (p − rate · √(1 − β₂ᵗ) / (1 − β₁ᵗ) · max(least_rms, RMS(p)) · m / (√v + ε))

    Weight decay is not scaled by the RMS.
    """

    def __init__(self, groups: list[dict[str, Any]], config: AdamWScaleConfig):
        super().__init__(groups, config)
        self.config = config

    def update(self, flat: Flat, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any) -> None:
        if not state:
            state["step"] = torch.zeros((), device=values.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
        beta1, beta2 = self.config.betas
        state["step"] += 1
        step = state["step"].double()  # 1 − 0.999ᵗ loses digits in fp32
        rate = group["lr"] * (1 - beta2**step).sqrt() / (1 - beta1**step)
        sizes = root_mean_squares(flat, self.summed(sums_of_squares(flat, values)))

        def moved(span: Span) -> Tensor:
            mean, square, new = (span.of(tensor) for tensor in (state["exp_avg"], state["exp_avg_sq"], gradient))
            mean.lerp_(new, 1 - beta1)
            square.mul_(beta2).addcmul_(new, new, value=1 - beta2)
            update = square.sqrt().add_(self.config.eps)
            return torch.div(mean, update, out=update)

        subtract(flat, moved, values, rate * sizes.clamp(min=self.config.least_rms))
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
