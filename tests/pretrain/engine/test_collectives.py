"""What ranks exchange in a step, by kind and in bytes, against the formula; and that they train as one rank does."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.loading.batch_layout import BatchLayout
from tests.support.rank_processes import each, on_ranks
from tests.support.slow import soak
from tests.support.small_runs import engine_of, micro_batches, row_offsets, run_config

LARGE = 100  # bytes: less is a few scalars
USE = 8 * (52 + 1)  # bytes: which of the 52 parameters each rank has used, with the loss, fp64
NAMES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast")


def layout_of(accumulation: int) -> BatchLayout:
    """Of 16 rows a step."""
    ranks = dist.get_world_size()
    return BatchLayout(dist.get_rank(), ranks, 16 // ranks // accumulation, accumulation)


def exchanged(stage: int, precision: str, accumulation: int) -> tuple[Counter[str], dict[str, int], list[int]]:
    """The collectives of the second step by name, the bytes of the large ones, and the elements of each flat buffer."""
    from deepspeed.comm import comm

    from pretrain.engine.deepspeed_private import flat_buffers

    engine = engine_of(run_config(stage, precision=precision, batch={"global_batch_size": 16}))
    layout = layout_of(accumulation)
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))  # in which the ranks compare what they use, too
    found: Counter[str] = Counter()
    large: Counter[str] = Counter()

    def noted(name: str, call: Any) -> Any:
        def collective(*given: Any, **named: Any) -> Any:
            whole = next(iter([*given, *named.values()])).nbytes  # the first argument, the result
            found[name] += 1
            large[name] += whole if whole > LARGE else 0
            return call(*given, **named)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(dist, name, noted(name, getattr(dist, name)))
        gather = "all_gather_into_tensor"  # DeepSpeed has chosen it already
        patch.setattr(comm.cdb, "all_gather_function", noted(gather, comm.cdb.all_gather_function))
        engine.step(1, row_offsets(layout, 1), micro_batches(layout, 1))
    sizes = [buffer.tensor.numel() * dist.get_world_size() for buffer in flat_buffers(engine.deepspeed)]
    engine.close()
    return found, {name: size for name, size in large.items() if size}, sizes


CASES = [
    (stage, precision, accumulation)
    for stage, precision in ((1, "bf16"), (1, "fp32"), (2, "fp32"))
    for accumulation in (1, 4)
]


BY_DEEPSPEED = [(stage, "bf16", accumulation) for stage in (2, 3) for accumulation in (1, 2, 8)]


@pytest.mark.parametrize("ranks", [2, *soak(4)])
def test_whatever_the_number_of_micro_batches_gradients_are_reduced_once_and_weights_gathered_once(ranks):
    """Of each flat buffer of n elements: 4n bytes are reduced, 2n or 4n gathered. Besides, three times a few scalars:
    counts and requests, losses, the norm. (NCCL's reduction leaves each rank its own part; gloo has none as fast.)"""
    for of_rank in on_ranks(ranks, each, exchanged, CASES):
        for case, (found, large, sizes) in zip(CASES, of_rank, strict=True):
            width = 2 if case[1] == "bf16" else 4
            gathered = sum(found[name] for name in ("all_gather", "all_gather_into_tensor"))
            assert (found["all_reduce"], gathered) == (3 + len(sizes), len(sizes)), case
            assert large == {"all_reduce": 4 * sum(sizes), "all_gather_into_tensor": width * sum(sizes)}, case
            assert found.total() == 3 + 2 * len(sizes), case


@pytest.mark.slow
def test_deepspeed_reduces_gradients_in_each_micro_batch():
    """At stage 2 in bf16, and at stage 3: 4n bytes of n elements each time, and once what the ranks have used. Stage 2
    gathers 2n once."""
    (found, _) = on_ranks(2, each, exchanged, BY_DEEPSPEED)
    for (stage, _, accumulation), (_, large, sizes) in zip(BY_DEEPSPEED, found, strict=True):
        assert large["all_reduce"] == accumulation * 4 * sum(sizes) + USE, (stage, accumulation)
        assert stage == 3 or large["all_gather_into_tensor"] == 2 * sum(sizes), accumulation


def trained(compiled: bool, precision: str, accumulation: int) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Losses and gradient norms of five steps of 16 rows, and the fp32 weights after them."""
    from deepspeed.utils import safe_get_full_fp32_param

    from pretrain.engine import construction

    construction.BACKEND = "aot_eager"  # in a process of this test's own: making kernels would take minutes
    settings = {"name": "adamw", "learning_rate": 1e-3, "gradient_clipping": 0.5}
    compute = {"compile": compiled}
    torch.compiler.reset()  # what has seen two numbers of rows is compiled for any
    engine = engine_of(
        run_config(1, precision=precision, batch={"global_batch_size": 16}, optimizer=settings, compute=compute)
    )
    layout = layout_of(accumulation)
    losses, norms = [], []
    for step in range(5):
        losses.append(engine.step(step, row_offsets(layout, step), micro_batches(layout, step)).loss)
        norms.append(engine.gradient_norm)
    weights = [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]
    engine.close()
    return losses, norms, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "of_four"),
    [(False, slice(4)), (True, slice(0)), pytest.param(True, slice(4), marks=pytest.mark.soak)],
)
def test_two_and_four_ranks_train_as_one_does(compiled, of_four):
    """In fp32 another order of sums is all that differs; in bf16 other roundings of each micro-batch's gradient.

    `of_four`: the cases of four ranks. Each rank compiles for itself, so only `make soak` has four compiled ranks."""
    cases = [(compiled, precision, accumulation) for precision in ("fp32", "bf16") for accumulation in (1, 4)]
    cases_of = {2: cases, 4: cases[of_four]}
    one = {precision: on_ranks(1, trained, compiled, precision, 1)[0] for precision in ("fp32", "bf16")}
    bounds = {"fp32": (1e-6, 1e-5), "bf16": (2e-3, 1e-2)}
    for ranks, chosen in ((ranks, chosen) for ranks, chosen in cases_of.items() if chosen):
        for of_rank in on_ranks(ranks, each, trained, chosen, seconds=800):
            for (_, precision, accumulation), (losses, norms, weights) in zip(chosen, of_rank, strict=True):
                expected_losses, expected_norms, expected = one[precision]
                loss_bound, weight_bound = bounds[precision]
                assert losses == pytest.approx(expected_losses, rel=loss_bound), (ranks, precision, accumulation)
                assert norms == pytest.approx(expected_norms, rel=2 * weight_bound), (ranks, precision, accumulation)
                change = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(weights, expected, strict=True)))
                whole = math.sqrt(sum(float(b.square().sum()) for b in expected))
                assert change / whole < weight_bound, (ranks, precision, accumulation)
