"""Optimizers, schedules, and the map from parameters to the flat tensors that ZeRO gives to optimizers.

Nothing here imports torch before an optimizer is built: a run file is validated in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pretrain.config.optimizers import OptimizerConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

# name: where its optimizer lives
_OPTIMIZERS = {
    "adamw": "pretrain.optimizers.adamw_scale.adamw",
    "adamw_scale": "pretrain.optimizers.adamw_scale.AdamWScale",
    "adafactor": "pretrain.optimizers.adafactor.Adafactor",
    "muon": "pretrain.optimizers.muon.Muon",
}


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Builds the optimizer for `deepspeed.initialize`. Raises UserError for groups that match no parameter."""
    from pretrain.optimizers.groups import parameter_groups  # imports torch

    module, name = _OPTIMIZERS[config.name].rsplit(".", 1)
    optimizer = getattr(import_module(module), name)(parameter_groups(model, config), config)
    if config.ema_decay is not None:
        from pretrain.optimizers.ema import keep_average  # imports torch

        keep_average(optimizer, config.ema_decay)
    return optimizer
