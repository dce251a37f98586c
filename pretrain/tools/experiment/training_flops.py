"""The arithmetic of a run, counted on its own rows."""

from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models.model import Sizes
from pretrain.trainer.throughput import sizes
from pretrain.trainer.validate import ValidatedRun

_PLACES, _ROWS_COUNTED = 8, 32  # rows at places all over the run, whose lengths stand for all


def rows_per_step(config: RunConfig) -> float:
    """The mean over the run, whose batch may grow."""
    steps = config.run.max_steps
    return (
        sum(config.batch.rows(step) for step in range(steps)) / steps if config.batch.ramp_up else config.batch.rows(0)
    )


def flops_per_step(setup: ValidatedRun) -> float:
    """The mean FLOPs of a step of the run, forward and backward."""
    model, rows = models.outline(setup.model), rows_per_step(setup.config)
    batches = TrainingBatches(setup.stream, BatchLayout(0, 1, _ROWS_COUNTED, 1))
    whole = setup.config.run.max_steps * rows
    firsts = [int(whole * (place + 0.5) / _PLACES) for place in range(_PLACES)]
    counted = sum(model.flops(Sizes(*sizes(batches[first].batch).tolist())) for first in firsts)
    return rows * counted / (_PLACES * _ROWS_COUNTED)
