"""An optimizer under DeepSpeed: ZeRO's layout of its parameters, its learning rates, and its factored state."""

from torch import Tensor
from torch.optim import Optimizer

from pretrain.config import RunConfig
from pretrain.optimizers.sharded import Sharded
from pretrain.zero.deepspeed_private import DeepSpeedEngine, flat_buffers, wrapped


def attach(engine: DeepSpeedEngine) -> None:
    """Gives ZeRO's layout of the parameters to the engine's optimizer. All ranks call this before the first step."""
    optimizer = wrapped(engine)
    if isinstance(optimizer, Sharded):
        optimizer.attach(flat_buffers(engine), engine.optimizer.dp_process_group, engine.device)


def set_rates(optimizer: Optimizer, config: RunConfig, step: int) -> float:
    """Sets every parameter group's learning rate for `step` (from 0), 0 while it is frozen. Returns that of groups
    without a rate of their own."""
    factor = config.rate_factor(step)
    for group in optimizer.param_groups:
        group["lr"] = group["base_rate"] * factor if step >= group["frozen_until"] else 0.0
    return config.learning_rate(step)


def factored_state(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """The optimizer state whose shape differs from its parameter's, by the names of parameter and state.

    Its tensors are whole and the same on every rank; don't modify them. Empty before the first step and for optimizers
    without such state.
    """
    optimizer = wrapped(engine)
    return optimizer.factored_state() if isinstance(optimizer, Sharded) else {}


def set_factored_state(engine: DeepSpeedEngine, state: dict[str, dict[str, Tensor]]) -> None:
    """Restores what `factored_state` returned, in an engine of any ZeRO stage and number of ranks."""
    optimizer = wrapped(engine)
    if isinstance(optimizer, Sharded):
        optimizer.set_factored_state(state)
