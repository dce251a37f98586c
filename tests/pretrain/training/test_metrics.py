"""Metrics that are recorded on every rank, and the losses between two log lines."""

import math

import pytest
import torch
import torch.distributed as dist

from pretrain.run.train_state import TrainState
from pretrain.training.callback import Metrics
from tests.support.rank_processes import on_ranks


def recorded() -> list[dict[str, float]]:
    """What two log lines have; rank 1 records other names than rank 0, and more often."""
    metrics, rank = Metrics(), dist.get_rank()
    for number in range(1 + 2 * rank):
        metrics.record("mean", 2.0 + rank + number)  # 2, and 3, 4, 5
        metrics.record("sum", 1, "sum")
        metrics.record("max", torch.tensor(-1.0 - number, dtype=torch.bfloat16), "max")
    if rank:
        metrics.record("of rank 1", 7.0, "max")
        metrics.record("not a number", math.nan, "max")
    else:
        metrics.record("not a number", 1.0, "max")
    return [metrics.take(), metrics.take()]


def test_values_are_reduced_over_steps_and_ranks_though_ranks_record_other_names():
    first, second = on_ranks(2, recorded)
    assert str(first) == str(second)  # NaN is unlike itself
    line, empty = first
    assert math.isnan(line.pop("not a number"))
    assert math.isnan(line.pop("train/loss"))  # no step was taken
    assert line == {"max": -1.0, "mean": (2 + 3 + 4 + 5) / 4, "of rank 1": 7.0, "sum": 4.0}
    assert empty.keys() == {"train/loss"}


def unlike() -> str:
    metrics = Metrics()
    metrics.record("x", 1.0, "max" if dist.get_rank() else "sum")
    with pytest.raises(ValueError, match="'x'") as error:
        metrics.take()
    return str(error.value)


def test_ranks_that_reduce_a_metric_in_different_ways_are_told_together():
    line = "the metric 'x' is recorded with reduce='sum' and 'max'"
    assert on_ranks(2, unlike) == [line, line]
    metrics = Metrics()
    metrics.record("x", 1.0)
    with pytest.raises(ValueError, match="reduce='mean' and 'sum'"):
        metrics.record("x", 1.0, "sum")
    with pytest.raises(ValueError, match="mean, sum, max, not 'min'"):
        metrics.record("x", 1.0, "min")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_losses_are_means_over_labels_and_continue_from_a_checkpoint():
    metrics = Metrics()
    metrics.add_losses({"labels": (0.1, 3), "embedding_loss": (1.0, 3)})
    later = Metrics()
    later.restore(TrainState(1, 1, [], unlogged=metrics.unlogged))
    for one in (metrics, later):
        one.add_losses({"labels": (0.2, 1), "embedding_loss": (3.0, 1)})
        one.record("mine", 2.0)
    assert later.take() == metrics.take() == {
        "train/embedding_loss": 1.0,
        "train/loss": (0.1 + 0.2) / 4,
        "mine": 2.0,
    }  # fmt: skip
