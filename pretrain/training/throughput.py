"""The rows and FLOPs of a mean step of a run."""

from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from data_pipeline.loading.prefetch import example_sizes
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models.flops import Sizes, count_flops
from pretrain.training.prepare import PreparedRun

_PLACES, _ROWS_COUNTED = 8, 32  # the lengths of 32 rows at 8 places of a run stand for all rows


def rows_per_step(config: RunConfig) -> float:
    """The mean number of rows per step over the run, whose batch may grow."""
    return config.batch.rows_before(config.run.max_steps) / config.run.max_steps


def flops_per_step(setup: PreparedRun) -> float:
    """The mean FLOPs of a step of the run, forward and backward, counted on its own rows."""
    model, rows = models.meta_model(setup.model), rows_per_step(setup.config)
    batches = TrainingBatches(setup.stream, BatchLayout(0, 1, _ROWS_COUNTED, 1))
    whole = setup.config.run.max_steps * rows
    row_offsets = [int(whole * (place + 0.5) / _PLACES) for place in range(_PLACES)]
    counted = sum(count_flops(model, Sizes(*example_sizes(batches[first].batch).tolist())) for first in row_offsets)
    return rows * counted / (_PLACES * _ROWS_COUNTED)
