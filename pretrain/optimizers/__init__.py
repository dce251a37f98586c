"""Optimizers, and the map from parameters to the flat tensors that ZeRO gives to optimizers."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers import AdamWConfig, OptimizerConfig
from pretrain.optimizers.adafactor import Adafactor
from pretrain.optimizers.adamw_scale import AdamWScale
from pretrain.optimizers.ema import keep_average
from pretrain.optimizers.groups import parameter_groups
from pretrain.optimizers.muon import Muon


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer for `deepspeed.initialize`. Raises UserError for groups that match no parameter."""
    optimizer = _OPTIMIZERS[config.name](parameter_groups(model, config), config)
    if config.ema_decay is not None:
        keep_average(optimizer, config.ema_decay)
    return optimizer


def _adamw(groups: ParamsT, config: AdamWConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019). It updates each element independently, so torch's own works under ZeRO."""
    return AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


_OPTIMIZERS: dict[str, Callable[[ParamsT, Any], Optimizer]] = {
    "adamw": _adamw,
    "adamw_scale": AdamWScale,
    "adafactor": Adafactor,
    "muon": Muon,
}
