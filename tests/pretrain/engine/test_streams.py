"""On a GPU, a step's work runs on several streams. What one writes and another reads or writes must be ordered."""

from typing import Any

import pytest

from data_pipeline.loading.batch_layout import BatchLayout
from tests.support.happens_before import HOST, Access, First, Freed, Marked, Record, Wait, needed, program, races
from tests.support.rank_processes import on_ranks
from tests.support.reductions import reducing
from tests.support.slow import slow
from tests.support.small_runs import engine_of, micro_batches, row_offsets, run_config
from tests.support.tables import each

A, B = 0, 1
WRITE, READ = Access(A, 0, 0, 8, True, "a write"), Access(B, 0, 4, 8, False, "a read")
FREED = [Access(B, 0, 0, 8, False, "a read"), Freed(0, A, frozenset())]
AGAIN = [First(1, A, 1), Access(A, 1, 0, 4, True, "a write")]


def then(waiting: int, stream: int) -> Record:
    """A stream, or the host, waits for another one."""
    return [Marked(9, stream), Wait(waiting, (9,), "here")]


@each(
    "record, racing",
    [
        ([WRITE, READ], True),
        ([READ, WRITE], True),
        ([WRITE, *then(B, A), READ], False),
        ([*then(B, A), WRITE, READ], True),  # before there was anything to wait for
        ([WRITE, *then(A, B), READ], True),  # the wrong one waits
        ([WRITE, *then(HOST, A), READ], False),  # launched when the host knew
        ([WRITE, *then(2, A), Marked(10, 2), Wait(B, (10,), ""), READ], False),  # by way of a third stream
        ([WRITE, READ._replace(stream=A)], False),
        ([WRITE, READ._replace(memory=1)], False),
        ([WRITE, READ._replace(low=8, high=12)], False),
        ([WRITE._replace(writes=False), READ], False),
        ([*FREED, *AGAIN], True),
        ([FREED[0], *then(A, B), *FREED[1:], *AGAIN], False),
        ([FREED[0], Freed(0, A, frozenset([B])), *AGAIN], False),  # with record_stream
        ([*FREED, First(1, A, 0), AGAIN[1]], False),  # allocated before that was freed
        ([*FREED, First(1, B, 1), AGAIN[1]], False),  # from another stream's memory
    ],
)
def test_accesses_without_an_order_are_a_race(record, racing):
    assert any(races(program(record))) is racing


MODEL = {"num_encoder_layers": 1, "num_decoder_layers": 1}  # the largest parameters have 3,200 elements
OVERLAPPING = {"overlap_comm": True, "reduce_bucket_size": 3000}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1": (1, "bf16", {}),
    "1 in fp32": (1, "fp32", {}),
    "2": (2, "bf16", {}),
    "2, offloaded": (2, "bf16", {"offload_optimizer": {"device": "cpu"}}),
    "3": (
        3,
        "bf16",
        {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000},
    ),
}
COPY = "engine_state.wait: default waits for an event on engine_state"
COPIED = "engine_state.begin: engine_state waits for default"
NEEDED = {
    "1": {COPIED, COPY},
    "1 in fp32": {COPIED, COPY},
    "2": {  # the host's wait orders the copy, too
        "stage_1_and_2.average_tensor: stage_1_and_2 waits for default",
        "stage_1_and_2.average_tensor: default waits for stage_1_and_2",
        "stage_1_and_2.independent_gradient_partition_epilogue: the host waits for all streams",
    },
    "2, offloaded": {"stage_1_and_2.average_tensor: stage_1_and_2 waits for an event on default"},
    "3": {
        COPY,
        "partition_parameters.wait: parameter_offload waits for a collective",
        "partitioned_param_coordinator._fetch_sub_module_impl: default waits for parameter_offload",
        "stage3.__add_grad_to_ipg_bucket: stage3 waits for default",
        "stage3.independent_gradient_partition_epilogue: the host waits for stage3",
    },
}
"""Others are there to be on the safe side, or to limit the memory of what is under way."""


def recorded(names: list[str], smaller: bool = False) -> dict[str, tuple[list[str], set[str]]]:
    """Of each case, the races, and the waits in the last step without one of which there is one. Each step has two
    micro-batches, and a checkpoint is copied after it. `smaller`: a bucket has no room for the largest parameter."""
    from pretrain.engine import engine as engines
    from pretrain.engine.checkpoint.engine_state import PinnedStaging
    from pretrain.engine.ranks import process_group
    from tests.support import recorded_streams  # makes classes of DeepSpeed's, which asks a rank for its device

    recorded_streams.use()
    found = {}
    own = engines.deepspeed_config
    with process_group(cpu_threads=1, seconds=120) as world, pytest.MonkeyPatch.context() as patch:
        if smaller:
            patch.setattr(engines, "deepspeed_config", lambda config, sharding, largest: own(config, sharding))
        for name in names:
            stage, precision, zero = CASES[name]
            # at stage 1 the ranks reduce gradients, not DeepSpeed
            with reducing(**(OVERLAPPING if stage > 1 else {})), recorded_streams.recording() as record:
                engine = engine_of(
                    run_config(stage, MODEL, zero, precision=precision, batch={"global_batch_size": 4 * world.size})
                )
                copies, layout = PinnedStaging(engine), BatchLayout(world.rank, world.size, 2, 2)
                for step in range(2):
                    begun, copy = len(record), copies.take()
                    engine.step(step, row_offsets(layout, step), micro_batches(layout, step), before_update=copies.wait)
                    copy.finish()
                engine.close()
            whole = program(record)
            last = range(len(program(record[:begun])), len(whole))
            found[name] = list(races(whole)), needed(whole, last)[0] if world.rank == 0 and not smaller else set()
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, ["1", "2", "3"]), *slow((4, [*CASES]))])
def test_a_step_orders_what_its_streams_do_and_would_not_without_these_waits(ranks, names):
    of_ranks = on_ranks(ranks, recorded, names, joined=False)
    assert [[found[name][0] for name in names] for found in of_ranks] == [[[]] * len(names)] * ranks
    assert {name: of_ranks[0][name][1] for name in names} == {name: NEEDED[name] for name in names}


@pytest.mark.slow
def test_a_bucket_smaller_than_a_parameter_is_a_race():
    """In DeepSpeed 0.19.8: `stage_1_and_2` is the stream on which it reduces."""
    of_ranks = on_ranks(2, recorded, ["2"], True, joined=False)
    found = [line for of_rank in of_ranks for line in of_rank["2"][0]]
    assert found
    assert all("on stage_1_and_2 " in line and "on default " in line for line in found)
