"""Optimizers, and the map from parameters to the flat tensors that ZeRO gives to optimizers."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers import OptimizerConfig
from pretrain.optimizers.adafactor import Adafactor
from pretrain.optimizers.adamw_scale import AdamWScale, adamw
from pretrain.optimizers.ema import keep_average
from pretrain.optimizers.groups import parameter_groups
from pretrain.optimizers.muon import Muon

_OPTIMIZERS: dict[str, Callable[[ParamsT, Any], Optimizer]] = {
    "adamw": adamw,
    "adamw_scale": AdamWScale,
    "adafactor": Adafactor,
    "muon": Muon,
}


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer for `deepspeed.initialize`. Raises UserError for groups that match no parameter."""
    optimizer = _OPTIMIZERS[config.name](parameter_groups(model, config), config)
    if config.ema_decay is not None:
        keep_average(optimizer, config.ema_decay)
    return optimizer
