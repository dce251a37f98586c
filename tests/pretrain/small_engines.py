"""An engine for a run file, on a rank: DeepSpeed is imported there, after the rank has its environment."""

from typing import Any

from pretrain.config import RunConfig


def engine_of(config: RunConfig) -> Any:
    """The engine of a model of random weights, as a run constructs it."""
    from pretrain.zero.construction import construct
    from pretrain.zero.engine import Engine

    return Engine(construct(config, config.model), config)
