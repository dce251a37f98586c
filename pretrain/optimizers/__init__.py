"""Optimizers, schedules, and the map from parameters to the flat slices that ZeRO hands them.

Nothing here imports torch before an optimizer is built: a run file is validated in milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pretrain.optimizers.config import OptimizerConfig

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pretrain.config import RunConfig

# name: where its optimizer lives
_OPTIMIZERS = {
    "adamw": "pretrain.optimizers.adamw.adamw",
    "adamw_scale": "pretrain.optimizers.adamw_scale.AdamWScale",
    "adafactor": "pretrain.optimizers.adafactor.Adafactor",
    "muon": "pretrain.optimizers.muon.Muon",
}


def build(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer that `config` describes, for `deepspeed.initialize`. Raises UserError for groups of nothing."""
    from pretrain.optimizers.groups import parameter_groups

    module, name = _OPTIMIZERS[config.name].rsplit(".", 1)
    return getattr(import_module(module), name)(parameter_groups(model, config), config)


def attach(engine: DeepSpeedEngine) -> None:
    """Tells the engine's optimizer what ZeRO has made of its parameters; all ranks call it before the first step."""
    from pretrain.optimizers.fragments import flats
    from pretrain.optimizers.sharded import Sharded

    optimizer = engine.optimizer.optimizer
    if isinstance(optimizer, Sharded):
        optimizer.attach(flats(engine), engine.optimizer.dp_process_group, engine.device)


def set_rates(optimizer: Optimizer, config: RunConfig, step: int) -> float:
    """Gives every parameter group its rate of step `step` (from 0): the schedule's, scaled to the group's own peak.

    Returns that of groups without a rate of their own.
    """
    from pretrain.optimizers.schedules import learning_rate

    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate * (group["base_rate"] / config.optimizer.learning_rate)
    return rate


def factored_state(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps of a parameter that is not laid out like it, by the parameter's name and its own:
    whole tensors, the same on every rank; not to be changed. Empty before the first step, or for an optimizer without.
    """
    from pretrain.optimizers.sharded import Sharded

    optimizer = engine.optimizer.optimizer
    return optimizer.factored_state() if isinstance(optimizer, Sharded) else {}


def set_factored_state(engine: DeepSpeedEngine, state: dict[str, dict[str, Tensor]]) -> None:
    """Puts back what `factored_state` gave, in an engine of any ZeRO stage and number of ranks."""
    from pretrain.optimizers.sharded import Sharded

    optimizer = engine.optimizer.optimizer
    if isinstance(optimizer, Sharded):
        optimizer.set_factored_state(state)
