"""AdamWScale of nanoT5 (Nawrot 2023, section 3): AdamW whose steps are relative to the size of each tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from pretrain.config.optimizers.adamw_scale import AdamWScaleConfig
from pretrain.engine.optimizers.adamw import count_step, fused_adamw
from pretrain.engine.optimizers.flat_buffers import (
    FlatBuffer,
    Sharded,
    fused_update,
    root_mean_squares,
    sums_of_squares,
)

_LEAST_RMS = 1e-3  # nanoT5's constant


class AdamWScale(Sharded):
    """Step t with gradient g, for each tensor p with moments m and v:

        p ← (1 − rate · decay) (p − rate · √(1 − β₂ᵗ) / (1 − β₁ᵗ) · max(0.001, RMS(p)) · m / (√v + ε))

    Weight decay is not scaled by the RMS.
    """

    config: AdamWScaleConfig

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        count_step(values, state)
        sizes = root_mean_squares(buffer, self.summed(sums_of_squares(buffer, values)))
        rates = group["lr"] * sizes.clamp(min=_LEAST_RMS)
        decay = group["lr"] * group["weight_decay"]
        beta1, beta2 = self.config.betas
        if fused_update(values.device):
            step = state["step"].double()  # 1 − 0.999ᵗ loses digits in fp32
            correction = (1 - beta2**step).sqrt() / (1 - beta1**step)
            mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            update = square.sqrt().add_(self.config.eps)
            torch.div(mean, update, out=update)
            values.addcmul_(update, buffer.spread(rates * correction), value=-1)
            if decay:
                values.mul_(1 - decay)
            return
        # The same by an AdamW for each parameter, which reads and writes each element once. AdamW decays before its
        # update, and divides √v by √(1 − β₂ᵗ) before it adds ε.
        eps = self.config.eps / math.sqrt(1 - beta2 ** int(state["step"]))
        for fragment, rate in zip(buffer.fragments, (rates * (1 - decay)).tolist(), strict=True):
            if not fragment.size:
                continue
            moments = {name: fragment.view(state[name]) for name in ("exp_avg", "exp_avg_sq")}
            fused_adamw(
                fragment.view(values),
                fragment.view(gradient),
                {**moments, "step": state["step"]},
                rate,
                decay / rate if decay else 0.0,
                self.config.betas,
                eps,
            )
