"""Optimizers, and the map from parameters to the flat tensors that ZeRO passes to optimizers.

The settings of an optimizer name its implementation: a `torch.optim.Optimizer`, called with the parameter groups and
the settings. ZeRO gives it flat fp32 tensors. An optimizer that updates each element by itself needs no more; one that
needs whole tensors is a subclass of `flat_buffers.Sharded`. Its state, by flat tensor, consists of fp32 tensors with an
element for each of the flat tensor's, and of scalars: checkpoints have both.
"""

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pretrain.config.optimizers.optimizer import OptimizerConfig
from pretrain.engine.optimizers.groups import parameter_groups

AVERAGE = "average"  # the name of a state


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer for `deepspeed.initialize`. Raises UserError for groups that match no parameter."""
    module, name = config.implementation.rsplit(".", 1)
    optimizer: Optimizer = getattr(import_module(module), name)(parameter_groups(model, config), config)
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
