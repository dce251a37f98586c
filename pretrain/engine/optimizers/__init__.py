"""Optimizers, and the map from parameters to the flat tensors that ZeRO passes to optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from pretrain.config.optimizers import OptimizerConfig
from pretrain.engine.optimizers.adafactor import Adafactor
from pretrain.engine.optimizers.adamw_scale import AdamWScale, adamw
from pretrain.engine.optimizers.groups import parameter_groups
from pretrain.engine.optimizers.muon import Muon

_OPTIMIZERS: dict[str, Callable[[ParamsT, Any], Optimizer]] = {
    "adamw": adamw,
    "adamw_scale": AdamWScale,
    "adafactor": Adafactor,
    "muon": Muon,
}
AVERAGE = "average"  # the name of a state


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer for `deepspeed.initialize`. Raises UserError for groups that match no parameter."""
    optimizer = _OPTIMIZERS[config.name](parameter_groups(model, config), config)
    if config.ema_decay is not None:
        keep_average(optimizer, config.ema_decay)
    return optimizer


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Keeps an exponential moving average of the fp32 parameters (Polyak and Juditsky 1992) among the optimizer's
    states, so that ZeRO shards and offloads it, and checkpoints have it.

    The average begins with the parameters after the first step, and is then decay · average + (1 − decay) · parameters,
    for each element by itself, so that it doesn't depend on how ZeRO shards parameters, or that ZeRO calls the
    optimizer for one flat buffer at a time. `pretrain average --ema` makes a checkpoint of the average.
    """

    @torch.no_grad()
    def update(stepped: Optimizer, *_: Any) -> None:
        updated = (one for group in stepped.param_groups for one in group["params"] if one.grad is not None)
        for buffer in updated:
            states = stepped.state[buffer]
            if AVERAGE in states:
                states[AVERAGE].lerp_(buffer, 1 - decay)
            else:
                states[AVERAGE] = buffer.detach().clone()

    optimizer.register_step_post_hook(update)
