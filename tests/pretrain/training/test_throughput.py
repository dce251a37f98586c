"""Rows per step."""

from pretrain.training.throughput import rows_per_step
from tests.support.small_runs import run_config


def test_the_rows_of_a_billion_steps_are_not_counted_one_by_one():
    """2 steps of 8 rows, 3 of 16, and all others of 24."""
    ramp = [{"until_step": 2, "global_batch_size": 8}, {"until_step": 5, "global_batch_size": 16}]
    long = {"name": "test", "directory": "run", "max_steps": 10**9}
    config = run_config(run=long, batch={"global_batch_size": 24, "ramp_up": ramp})
    assert rows_per_step(config) == (2 * 8 + 3 * 16 + (10**9 - 5) * 24) / 10**9
