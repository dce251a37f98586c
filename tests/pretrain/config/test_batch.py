"""How a step is divided into micro-batches."""

from pretrain.config.batch import BatchPlan
from tests.support.small_runs import run_config


def test_the_rows_before_a_step_are_those_of_the_steps_before_it():
    """On 2 ranks, with 4 rows in a micro-batch: 1, 2 and 3 micro-batches a step."""
    ramp = [{"until_step": 2, "global_batch_size": 8}, {"until_step": 5, "global_batch_size": 16}]
    ramped = [1, 1, 2, 2, 2, 3, 3, 3, 3]
    for changes, counts in (({"ramp_up": ramp}, ramped), ({}, [3] * 9)):
        batch = run_config(batch={"global_batch_size": 24, "micro_batch_size": 4, **changes}).batch
        plan = BatchPlan(batch, ranks=2)
        assert [batch.rows_before(step) for step in range(10)] == [8 * sum(counts[:step]) for step in range(10)]
        for start in range(10):
            assert list(plan.accumulations(start, 9)) == counts[start:]
        assert list(plan.accumulations(1, 4)) == counts[1:4]
