"""Steps that are computed twice: training stays as it is, and wrong arithmetic is found and its rank named."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.loading.batch_layout import BatchLayout
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import error_of, run_file
from tests.pretrain.small_runs import flip as flip_bit
from tests.pretrain.small_runs import micro_batches, run_config
from tests.slow import slow

ROWS = 2  # of a micro-batch
TENSOR = "decoder.layers.1.feed_forward.wo.weight"
Plant = Callable[[torch.nn.Module, int], contextlib.AbstractContextManager[None]]


def trained(
    stage: int,
    precision: str = "fp32",
    accumulation: int = 1,
    every: int | None = 1,
    steps: int = 3,
    plant: Plant | None = None,
    repeats: bool = True,
    recomputed: bool = False,
    **model: Any,
) -> tuple[list[tuple[float, float]], dict[str, bytes], list[Any]]:
    """Losses and norms of a T5 with tied embeddings and dropout, its weights, and what replays found in each step.

    `plant` makes the block in which a step is taken wrong. All ranks call this together.
    """
    from pretrain import models
    from pretrain.run import environment
    from pretrain.trainer.callbacks.replay import Replaying
    from pretrain.zero.engine import Engine
    from tests.pretrain.exactness import whole_parameters

    ranks = dist.get_world_size()
    rows = ROWS * accumulation * ranks
    compute = {"activation_checkpointing": recomputed}
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # else all parameters would stay whole
    batch = {"global_batch_size": rows, "micro_batch_size": ROWS}
    model = {"dropout_rate": 0.1, "tie_embeddings": True, **model}
    faults = {"replay_every_steps": every}
    config = run_config(stage, model, zero, precision=precision, batch=batch, compute=compute, faults=faults)
    torch.manual_seed(0)
    engine = Engine(models.build(config.model), config)
    layout = BatchLayout(dist.get_rank(), ranks, ROWS, accumulation)
    trainer = SimpleNamespace(config=config, engine=engine, layout=layout, run=SimpleNamespace(ranks=ranks))
    trainer.report, trainer.state = SimpleNamespace(machines=environment.machines()), SimpleNamespace(step=0)
    replay = Replaying()
    replay.before_training(trainer)
    if not repeats:
        replay._repeats, replay._spread = False, None
    replay.before_steps(trainer)
    numbers, found = [], []
    for step in range(steps):
        batches = trainer.micro_batches = micro_batches(layout, step)
        trainer.before = SimpleNamespace(step=step, position=step * rows)
        wrong = plant(engine.deepspeed.module, step) if plant else contextlib.nullcontext()
        with wrong, replay.during_step(trainer):
            outcome = engine.step(step, step * rows, batches)
        numbers.append((outcome.loss, engine.gradient_norm))
        found.append(replay.found)
        assert every is None or replay.found or replay.clean == step + 1
    weights = {name: tensor.numpy().tobytes() for name, tensor in whole_parameters(engine).items()}
    engine.close()
    return numbers, weights, found


def found_with(
    plant: Plant, stage: int, precision: str = "fp32", dropout_rate: float = 0.1, steps: int = 2, repeats: bool = True
) -> list[Any]:
    return trained(stage, precision, plant=plant, steps=steps, repeats=repeats, dropout_rate=dropout_rate)[2]


# stage, precision, micro-batches, and whether layers are computed again in the backward pass
QUICK = [(2, "bf16", 3, False), (3, "fp32", 1, False)]
OTHERS = [
    (1, "fp32", 3, False),
    (1, "bf16", 1, False),
    (2, "fp32", 1, False),
    (3, "bf16", 3, False),
    (3, "fp32", 1, True),
]


def with_and_without(*case: Any) -> tuple[Any, ...]:
    *others, recomputed = case
    return tuple(trained(*others, every=every, recomputed=recomputed) for every in (1, None))


@pytest.mark.parametrize("cases", [QUICK, *slow(OTHERS)], ids=["some", "others"])
def test_losses_norms_and_weights_are_those_of_a_run_without_replays(cases):
    for ranks in (1, 2):
        for of_rank in on_ranks(ranks, each, with_and_without, cases):
            for case, (replayed, plain) in zip(cases, of_rank, strict=True):
                assert replayed[2] == [None] * 3, case
                assert replayed[:2] == plain[:2], case


@contextlib.contextmanager
def flipped(model: torch.nn.Module, step: int, rank: int, bit: int, activation: bool = False) -> Iterator[None]:
    """In the pass of step 1 that trains, after its replays, flips a bit of a gradient or of an activation on `rank`."""
    passes, replays = 0, 1 if dist.get_world_size() == 1 else 2

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    def flip(values: Tensor) -> Tensor:
        if step != 1 or passes != replays + 1 or dist.get_rank() != rank:
            return values
        values = values.clone()
        found = (values[0, 0] if activation else values).detach().view(-1)  # the first target always counts
        place = int(found.abs().argmax())  # elements that are zero, or that are multiplied by zero, would hide it
        flip_bit(found, place, bit)
        return values

    if activation:
        layer = model.get_submodule(TENSOR.removesuffix(".weight"))
        planted = layer.register_forward_hook(lambda module, inputs, output: flip(output))
    else:
        planted = model.get_parameter(TENSOR).register_hook(flip)
    with model.register_forward_pre_hook(count), planted:
        yield


# Low and high bits of the mantissa, bits of the exponent, and signs. The lowest bit of an activation may be lost in the
# next sum, which leaves gradients as they are.
QUICK_FLIPS = [(2, "bf16", 0, 0, False), (2, "fp32", 1, 31, False), (3, "fp32", 0, 12, False), (3, "fp32", 1, 25, True)]
OTHER_FLIPS = [
    *((stage, "fp32", stage % 2, 0, False) for stage in (1, 2, 3)),
    *((stage, "bf16", stage % 2, bit, False) for stage, bit in ((1, 15), (1, 0), (2, 5), (2, 9), (3, 0))),
    *((2, "fp32", bit % 2, bit, False) for bit in (12, 25)),
    *((stage, precision, 0, bit, True) for stage, precision, bit in ((2, "fp32", 12), (2, "bf16", 5), (3, "bf16", 15))),
]


@pytest.mark.parametrize("flips", [QUICK_FLIPS, *slow(OTHER_FLIPS)], ids=["some", "others"])
def test_a_flipped_bit_is_found_and_its_rank_and_tensor_are_named(flips):
    plants = [
        # dropout may remove the very element
        (partial(flipped, rank=rank, bit=bit, activation=activation), stage, precision, 0.0 if activation else 0.1)
        for stage, precision, rank, bit, activation in flips
    ]
    told, same = on_ranks(2, each, found_with, plants)
    assert told == same
    for flip, (before, found) in zip(flips, told, strict=True):
        _, _, rank, _, activation = flip
        assert before is None, flip
        assert found is not None, flip
        assert found.rank == rank, flip
        assert found.what.startswith(f"rank {rank} ("), flip
        assert ") computes different gradients from the same micro-batch: " in found.what
        if not activation:
            assert found.what.endswith(f": {TENSOR}"), flip


@contextlib.contextmanager
def scaled(model: torch.nn.Module, step: int, rank: int) -> Iterator[None]:
    """From step 1 on, a layer on `rank` always computes a little more than it should, as a broken core may."""

    def more(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * (1 + 2**-20) if step and dist.get_rank() == rank else output

    with model.get_submodule(TENSOR.removesuffix(".weight")).register_forward_hook(more):
        yield


@pytest.mark.parametrize("cases", [[(2, 1)], *slow([(1, 0), (3, 2)])], ids=["some", "others"])
def test_of_three_ranks_the_one_that_is_always_wrong_is_named_and_of_two_neither(cases):
    for ranks in (3, 2):
        own = [case for case in cases if case[1] < ranks]
        plants = [(partial(scaled, rank=rank), stage) for stage, rank in own]
        for told in on_ranks(ranks, each, found_with, plants):
            for (_, rank), (before, found) in zip(own, told, strict=True):
                assert before is None
                assert found.rank == (rank if ranks == 3 else None)
                assert found.what.startswith(f"rank {rank} (" if ranks == 3 else "one of rank 0 (")
                assert ") computes other gradients than other ranks from the same micro-batch: " in found.what


@contextlib.contextmanager
def noisy(model: torch.nn.Module, step: int, noise: float, wrong: float) -> Iterator[None]:
    """Adds noise to each gradient of a layer; from step 8 on, it is also too large by `wrong` in each third pass."""
    draws = torch.Generator().manual_seed(step + 1000 * dist.get_rank())
    passes = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        more = 1 + wrong if step >= 8 and passes % 3 == 0 and dist.get_rank() == 1 else 1
        return gradient * more + noise * gradient.norm() * torch.randn(gradient.shape, generator=draws)

    with model.get_parameter(TENSOR).register_hook(hook):
        yield


def test_arithmetic_that_does_not_repeat_is_compared_within_its_spread():
    noises = [(partial(noisy, noise=1e-4, wrong=wrong), 2, "fp32", 0.1, 10, False) for wrong in (0.0, 0.3)]
    (clean, found), _ = on_ranks(2, each, found_with, noises)
    assert clean == [None] * 10
    assert found[:8] == [None] * 8
    assert (found[8].rank, found[8].what.endswith(f": {TENSOR}")) == (1, True)


def test_the_interval_adds_a_five_hundredth_of_the_passes_and_meets_the_saves():
    from pretrain.trainer.callbacks.replay import interval

    assert interval(7, 1, 8, 1000) == 7
    assert interval(None, 1, 8, 1000) is None
    assert interval("auto", 1, 8, 1000) == 1000
    assert interval("auto", 3, 8, 1000) == 500  # 334 steps suffice
    assert interval("auto", 1, 1, 1000) == 1000  # 625 suffice
    assert interval("auto", 1, 8, 30) == 1020
    assert interval("auto", 1, 8, 997) == 1994
    assert interval("auto", 4096, 8, 1000) == 1


def test_ranks_pass_their_rows_on_to_those_that_round_alike():
    from pretrain.trainer.callbacks.replay import next_of

    assert next_of(["a", "a", "a"]) == [1, 2, 0]
    assert next_of(["a", "b", "a", "c", "b"]) == [2, 4, 0, 3, 1]


def broken_off(path: Path, node: Path, wrong_at: int) -> str:
    """The error of a run whose rank 1 computes wrong in step `wrong_at`."""
    from pretrain.run import node_memory
    from pretrain.zero.engine import Engine

    right = Engine.step

    def wrong(self: Any, step: int, *arguments: Any) -> Any:
        def more(model: Any, inputs: Any, losses: dict[str, Tensor]) -> dict[str, Tensor]:
            factor = 1 + 2**-10 if step + 1 == wrong_at and dist.get_rank() == 1 else 1
            return {name: values * factor for name, values in losses.items()}

        with self.deepspeed.module.register_forward_hook(more):
            return right(self, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(node_memory.DIRECTORY, str(node))
        patch.setattr(Engine, "step", wrong)
        return error_of(path)


def test_a_finding_ends_the_attempt_and_later_checkpoints_are_not_gone_on_from(small_corpus, tmp_path):
    """Wrong is step 6, which is replayed; saved are steps 2 and 4, and in memory is each step."""
    cases = [(2, 4, 4, []), (3, 3, 2, ["unsound-step-00000004"])]
    runs = []
    for every, *_ in cases:
        path = run_file(
            tmp_path / str(every),
            small_corpus,
            evaluation=[],
            faults={"replay_every_steps": every},
            checkpoint={"every_steps": 2, "keep_last": 9, "memory_every_steps": 1},
        )
        (path.parent / "node").mkdir()
        runs.append((path, path.parent / "node", 6))
    errors, same = on_ranks(2, each, broken_off, runs)
    assert errors == same
    for (every, clean, latest, aside), error in zip(cases, errors, strict=True):
        assert error.startswith("step 6: rank 1 (")
        assert ") computes different gradients from the same micro-batch: " in error
        assert f"; nothing was wrong at step {clean}" in error
        checkpoints = tmp_path / str(every) / "run/checkpoints"
        assert (checkpoints / "latest").read_text() == f"step-{latest:08d}\n"
        assert sorted(one.name for one in checkpoints.glob("unsound-*")) == aside
        assert not list((tmp_path / str(every) / "node").glob("checkpoints/step-*"))
