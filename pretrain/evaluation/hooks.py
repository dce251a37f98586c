"""Which evaluations are due after which step."""

from collections.abc import Callable

from pretrain.evaluation.validation_loss import validation_loss
from pretrain.run import watchdog
from pretrain.setup import Setup
from pretrain.zero.engine import Engine

HOOKS: dict[str, Callable[[Engine, Setup], dict[str, float]]] = {"validation_loss": validation_loss}


def run_hooks(engine: Engine, setup: Setup, step: int, last: bool) -> dict[str, float]:
    """Runs each hook that is due after `step` steps and returns the metrics. After the last step, every hook is due."""
    metrics: dict[str, float] = {}
    for hook in dict.fromkeys(entry.hook for entry in setup.config.evaluation if last or step % entry.every_steps == 0):
        with watchdog.apart():
            metrics |= HOOKS[hook](engine, setup)
    return metrics
