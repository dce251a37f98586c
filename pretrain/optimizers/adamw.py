"""AdamW (Loshchilov and Hutter 2019). It updates each element independently, so torch's own works under ZeRO."""

from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers import AdamWConfig


def adamw(groups: ParamsT, config: AdamWConfig) -> AdamW:
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
