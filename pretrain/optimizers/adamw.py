"""AdamW (Loshchilov and Hutter 2019). It updates each element independently, so torch's own works under ZeRO."""

from typing import Any

from torch.optim import AdamW

from pretrain.optimizers.config import AdamWConfig


def adamw(groups: list[dict[str, Any]], config: AdamWConfig) -> AdamW:
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
