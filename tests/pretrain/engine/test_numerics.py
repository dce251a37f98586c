"""The comparison of DeepSpeed with a plain loop: exact, silent where DeepSpeed is right, and loud where it isn't."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from tests.support import plain_loop
from tests.support.plain_loop import ExactModel
from tests.support.rank_processes import each, on_ranks
from tests.support.reductions import reducing
from tests.support.small_runs import run_config

ON_CPU = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS_TOO = {**ON_CPU, "offload_param": {"device": "cpu"}}


def wrong(stage: int, precision: str, accumulation: int, zero: dict[str, Any], overlapping: bool = False) -> str:
    with reducing(**({"overlap_comm": True} if overlapping else {})):  # as on GPUs
        return plain_loop.differences(run_config(stage, None, zero, precision=precision), accumulation)


FIRST = [(2, "bf16", 3, {}), (3, "fp32", 3, {}), (3, "bf16", 3, ON_CPU)]
OTHERS = [
    *itertools.product((1, 2, 3), ("fp32", "bf16"), (1, 3), [{}]),
    *itertools.product((1, 2, 3), ("fp32", "bf16"), (3,), [ON_CPU]),
    (3, "bf16", 3, PARAMETERS_TOO),
    (2, "bf16", 3, {}, True),
    (2, "fp32", 3, {"allgather_partitions": False}),
    (2, "bf16", 3, {"parameter_alignment": True}),
]


@pytest.mark.slow
def test_the_tested_deepspeed_trains_as_a_plain_loop_does():
    for found in on_ranks(2, each, wrong, OTHERS, seconds=600):
        assert {str(case): wrong for case, wrong in zip(OTHERS, found, strict=True) if wrong} == {}


def test_one_rank_is_compared_too():
    cases = [(stage, precision, 3, {}) for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
    assert on_ranks(1, each, wrong, cases) == [[""] * len(cases)]


@contextlib.contextmanager
def losing(lost: str) -> Iterator[None]:
    """Within the block, the engine loses part of the gradient, as some versions of DeepSpeed do."""

    class Broken(plain_loop.Engine):
        @classmethod
        def initialize(cls, model: ExactModel, *given: Any, **named: Any) -> "Broken":
            uses: list[Tensor] = []
            if lost == "a layer's second use":
                model.layers[0].register_forward_hook(lambda _, inputs, output: without_second(uses, output))
            return super().initialize(model, *given, **named)

        def step(self, step: int, firsts: Sequence[int], batches: list[Any], *given: Any) -> Any:
            if lost == "a label of step 2" and dist.get_rank() == 1 and step == 1:
                batches[0]["labels"].view(-1)[0] = IGNORE_INDEX
            return super().step(step, firsts, batches, *given)

    def without_second(uses: list[Tensor], output: Tensor) -> Tensor:
        uses.append(output)
        return output.detach() if len(uses) % 2 == 0 else output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "Engine", Broken)
        yield


def wrong_with(lost: str, stage: int, precision: str) -> str:
    with losing(lost):
        return wrong(stage, precision, 3, {})


def wrong_on_rank_1() -> str:
    right = plain_loop._wrong
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "_wrong", lambda *given: right(*given) or ("gain" if dist.get_rank() else ""))
        return wrong(2, "fp32", 1, {})


def wrong_without_reduction() -> str:
    """At stage 1, where the engine itself reduces the ranks' gradients."""
    from pretrain.engine.gradients import LocalGradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalGradients, "reduce", lambda self: None)
        return wrong(1, "bf16", 3, {})


def keeps_random_numbers() -> bool:
    before = torch.get_rng_state()
    assert wrong(2, "bf16", 1, {}) == ""
    return torch.equal(torch.get_rng_state(), before)


def with_and_without_losses() -> dict[str, Any]:
    twice = "a layer's second use"
    return {
        "right": [wrong(*case) for case in FIRST],
        "twice": [wrong_with(twice, 2, "bf16"), wrong_with(twice, 3, "fp32")],
        "label": wrong_with("a label of step 2", 1, "bf16"),
        "rank 1": wrong_on_rank_1(),
        "unreduced": wrong_without_reduction(),
        "random numbers": keeps_random_numbers(),
    }


def test_a_lost_gradient_is_found_on_all_ranks():
    for found in on_ranks(2, with_and_without_losses, seconds=600):
        assert found["right"] == [""] * len(FIRST)
        assert found["random numbers"]
        for one in found["twice"]:
            assert one.startswith("wrong from step 1 on: layers.0.weight (36 elements, gradient ")
            assert "layers.0.bias (6 elements, gradient " in one
            assert "embedding" not in one
        assert found["label"].startswith("wrong from step 2 on: gain (")
        assert found["rank 1"] == "wrong from step 1 on: gain"
        assert found["unreduced"].startswith("wrong from step 1 on: ")
