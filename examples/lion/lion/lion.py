"""Lion: evolved sign momentum (Chen et al. 2023, arXiv 2302.06675)."""

from typing import Any

import torch
from torch import Tensor

from lion.settings import LionConfig
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, Sharded


class Lion(Sharded):
    """Step with gradient g, for each element p with momentum m (algorithm 2):

    u = sign(β₁ m + (1 − β₁) g)
    p ← p − rate · (u + decay · p)
    m ← β₂ m + (1 − β₂) g
    """

    config: LionConfig

    def update(
        self, buffer: FlatBuffer, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: Any
    ) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(values)
        momentum, (beta1, beta2) = state["momentum"], self.config.betas
        signs = momentum.lerp(gradient, 1 - beta1).sign_()
        values.mul_(1 - group["lr"] * group["weight_decay"]).sub_(signs, alpha=group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
