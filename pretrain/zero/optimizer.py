"""An optimizer under DeepSpeed: what ZeRO has made of its parameters, its rates, and its state of shapes of its own."""

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer

from pretrain.config import RunConfig
from pretrain.optimizers.sharded import Sharded
from pretrain.zero.internals import flats


def attach(engine: DeepSpeedEngine) -> None:
    """Tells the engine's optimizer what ZeRO has made of its parameters; all ranks call it before the first step."""
    optimizer = engine.optimizer.optimizer
    if isinstance(optimizer, Sharded):
        optimizer.attach(flats(engine), engine.optimizer.dp_process_group, engine.device)


def set_rates(optimizer: Optimizer, config: RunConfig, step: int) -> float:
    """Gives every parameter group its rate of step `step` (from 0): the schedule's, scaled to the group's own peak.

    Returns that of groups without a rate of their own.
    """
    rate = config.learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate * (group["base_rate"] / config.optimizer.learning_rate)
    return rate


def factored_state(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """What the optimizer keeps of a parameter that is not laid out like it, by the parameter's name and its own:
    whole tensors, the same on every rank; not to be changed. Empty before the first step, or for an optimizer without.
    """
    optimizer = engine.optimizer.optimizer
    return optimizer.factored_state() if isinstance(optimizer, Sharded) else {}


def set_factored_state(engine: DeepSpeedEngine, state: dict[str, dict[str, Tensor]]) -> None:
    """Puts back what `factored_state` gave, in an engine of any ZeRO stage and number of ranks."""
    optimizer = engine.optimizer.optimizer
    if isinstance(optimizer, Sharded):
        optimizer.set_factored_state(state)
