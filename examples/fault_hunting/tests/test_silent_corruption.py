"""Silent data corruption: wrong arithmetic and bits that flip in memory are found, and the rank is named.

Training stays as it is, and nothing is found in a clean run.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fault_hunting import Replay, memory
from fault_hunting.memory import checksum, difference, interval
from fault_hunting.replay import interval as replay_interval
from fault_hunting.replay import next_of
from torch import Tensor

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from data_pipeline.loading.batch_layout import BatchLayout
from pretrain import models
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.engine_state import fingerprint_of_masters
from pretrain.engine.deepspeed_private import flat_buffers, fragments, local_weights, wrapped
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import joined_world
from pretrain.run import environment
from pretrain.training.run import train_in_group
from tests.support import tables
from tests.support.exactness import whole_parameters
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import run_file
from tests.support.slow import slow, soak
from tests.support.small_runs import engine_of, flip, micro_batches, own_sharding, row_offsets, run_config

# Steps that are computed twice

ROWS = 2  # of a micro-batch
TENSOR = "decoder.layers.1.feed_forward.wo.weight"
Spoil = Callable[..., contextlib.AbstractContextManager[None]]
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
    ranks = dist.get_world_size()
    rows = ROWS * accumulation * ranks
    compute = {"activation_checkpointing": recomputed}
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}  # else all parameters would stay whole
    batch = {"global_batch_size": rows, "micro_batch_size": ROWS}
    model = {"dropout_rate": 0.1, "tie_embeddings": True, **model}
    config = run_config(stage, model, zero, precision=precision, batch=batch, compute=compute)
    torch.manual_seed(0)
    engine = Engine.initialize(models.build(config.model), config, own_sharding(config))
    layout = BatchLayout(dist.get_rank(), ranks, ROWS, accumulation)
    trainer = SimpleNamespace(config=config, engine=engine, layout=layout, run=SimpleNamespace(world=joined_world()))
    trainer.report = SimpleNamespace(machines=[environment.this_machine(*range(ranks))])
    trainer.state = SimpleNamespace(step=0)
    replay = Replay(every) if every else None
    if replay:
        replay.before_training(trainer)
        if not repeats:
            replay._repeats, replay._spread = False, None
        replay.before_steps(trainer)
    numbers, found = [], []
    for step in range(steps):
        batches = micro_batches(layout, step)
        trainer.state = SimpleNamespace(step=step, position=step * rows)
        wrong = plant(engine.deepspeed.module, step) if plant else contextlib.nullcontext()
        with wrong, replay.during_step(trainer, batches) if replay else contextlib.nullcontext():
            outcome = engine.step(step, row_offsets(layout, step), batches)
        numbers.append((outcome.loss, engine.gradient_norm))
        found.append(replay.found if replay else None)
        assert replay is None or replay.found or replay.clean == step + 1
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


@pytest.mark.parametrize("cases", [QUICK, *soak(OTHERS)], ids=["some", "others"])
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

    def spoil(values: Tensor) -> Tensor:
        if step != 1 or passes != replays + 1 or dist.get_rank() != rank:
            return values
        values = values.clone()
        found = (values[0, 0] if activation else values).detach().view(-1)  # the first target always counts
        place = int(found.abs().argmax())  # elements that are zero, or that are multiplied by zero, would hide it
        flip(found, place, bit)
        return values

    if activation:
        layer = model.get_submodule(TENSOR.removesuffix(".weight"))
        planted = layer.register_forward_hook(lambda module, inputs, output: spoil(output))
    else:
        planted = model.get_parameter(TENSOR).register_hook(spoil)
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


@pytest.mark.parametrize("flips", [QUICK_FLIPS, *soak(OTHER_FLIPS)], ids=["some", "others"])
def test_a_flipped_bit_is_found_and_its_rank_and_tensor_are_named(flips):
    plants = [
        # dropout may remove the very element
        (partial(flipped, rank=rank, bit=bit, activation=activation), stage, precision, 0.0 if activation else 0.1)
        for stage, precision, rank, bit, activation in flips
    ]
    told, same = on_ranks(2, each, found_with, plants)
    assert told == same
    for case, (before, found) in zip(flips, told, strict=True):
        _, _, rank, _, activation = case
        assert before is None, case
        assert found is not None, case
        assert found.rank == rank, case
        assert found.what.startswith(f"rank {rank} ("), case
        assert ") computes different gradients from the same micro-batch: " in found.what
        if not activation:
            assert found.what.endswith(f": {TENSOR}"), case


@contextlib.contextmanager
def scaled(model: torch.nn.Module, step: int, rank: int) -> Iterator[None]:
    """From step 1 on, a layer on `rank` always computes a little more than it should, as a broken core may."""

    def more(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * (1 + 2**-20) if step and dist.get_rank() == rank else output

    with model.get_submodule(TENSOR.removesuffix(".weight")).register_forward_hook(more):
        yield


@pytest.mark.parametrize("cases", [[(2, 1)], *soak([(1, 0), (3, 2)])], ids=["some", "others"])
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
    assert replay_interval(1, 8, 1000) == 1000
    assert replay_interval(3, 8, 1000) == 500  # 334 steps suffice
    assert replay_interval(1, 1, 1000) == 1000  # 625 suffice
    assert replay_interval(1, 8, 30) == 1020
    assert replay_interval(1, 8, 997) == 1994
    assert replay_interval(4096, 8, 1000) == 1
    assert replay_interval(1, 8, 999_999_937) == 999_999_937  # a prime; it isn't found by counting


def test_ranks_pass_their_rows_on_to_those_that_round_alike():
    assert next_of(["a", "a", "a"]) == [1, 2, 0]
    assert next_of(["a", "b", "a", "c", "b"]) == [2, 4, 0, 3, 1]


def watched(folder: Path, corpus: Path, stage: int = 2, keep_last: int = 9, **sections: Any) -> Path:
    """The run file of a run that saves every second step."""
    checkpoint = {"every_steps": 2, "keep_last": keep_last}
    return run_file(folder, corpus, stage, checkpoint=checkpoint, evaluation=[], **sections)


def error_and_losses(path: Path, spoil: Spoil, *given: Any) -> tuple[str, list[float]]:
    """The error of a run whose steps are taken in the block of `spoil(engine, step, *given)`, and their losses."""
    right, losses = Engine.step, []

    def step(self: Any, number: int, *arguments: Any) -> Any:
        with spoil(self, number + 1, *given):
            outcome = right(self, number, *arguments)
        losses.append(outcome.loss)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        try:
            train_in_group(joined_world(), load(path, [], RunConfig))
        except FailedError as error:
            return str(error), losses
    return "", losses


@contextlib.contextmanager
def computing_wrong(engine: Any, step: int) -> Iterator[None]:
    """Rank 1 computes wrong in step 6."""

    def more(model: Any, inputs: Any, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        factor = 1 + 2**-10 if step == 6 and dist.get_rank() == 1 else 1
        return {name: values * factor for name, values in losses.items()}

    with engine.deepspeed.module.register_forward_hook(more):
        yield


def test_a_finding_ends_the_attempt_and_later_checkpoints_are_not_gone_on_from(small_corpus, tmp_path):
    """Wrong is step 6, which is replayed; saved are steps 2 and 4."""
    later = ["unsound-step-00000004"]
    only = "; step-00000002 may be wrong too, but it is the oldest: the run resumes from it"
    cases = [(2, 4, 4, [], ""), (3, 3, 2, later, ""), (6, 1, 2, later, only)]
    runs = []
    for every, *_ in cases:
        callbacks = [{"name": "fault_hunting:Replay", "every_steps": every}]
        path = watched(tmp_path / str(every), small_corpus, callbacks=callbacks)
        runs.append((path, computing_wrong))
    found, same = on_ranks(2, each, error_and_losses, runs)
    assert found == same
    for (every, clean, latest, aside, more), (error, _) in zip(cases, found, strict=True):
        assert error.startswith("step 6: rank 1 (")
        assert ") computes different gradients from the same micro-batch: " in error
        renamed = f"; {', '.join(aside)}: set aside" if aside else ""
        assert error.partition("; nothing was wrong at step ")[2].startswith(f"{clean}{renamed}{more}")
        assert ("may be wrong too" in error) == bool(more)
        checkpoints = tmp_path / str(every) / "run/checkpoints"
        assert (checkpoints / "latest").read_text() == f"step-{latest:08d}\n"
        assert sorted(one.name for one in checkpoints.glob("unsound-*")) == aside


# Bits that flip in a rank's memory between two updates: found before the second

CHECKSUMS = [{"name": "fault_hunting:MemoryChecksums", "every_steps": 1}]
STEP, FLIPPED = 5, 1  # a bit of this rank flips between the updates of this step and of the one before


@contextlib.contextmanager
def flipping(engine: Any, step: int, what: str) -> Iterator[None]:
    """Before step `STEP`, a bit flips in `what` this rank has."""
    if step == STEP and dist.get_rank() == FLIPPED:
        if what == "weights":
            weights = local_weights(engine.deepspeed)
            assert weights is not None
            flip(max((values for values, *_ in weights), key=len), 3, 14)
        elif what == "the optimizer's weights":
            flip(flat_buffers(engine.deepspeed)[0].tensor, 3, 20)
        elif what:
            flip(next(iter(wrapped(engine.deepspeed).state.values()))[what], 3, 20)
    yield


PLACES = ("", "weights", "the optimizer's weights", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16"), *soak((2, "bf16"), (3, "fp32"))])
def test_a_bit_that_flips_between_updates_is_found_before_the_second(stage, precision, small_corpus, tmp_path):
    runs = []
    for what in PLACES:
        path = watched(tmp_path / (what or "clean"), small_corpus, stage, precision=precision, callbacks=CHECKSUMS)
        runs.append((path, flipping, what))
    found, same = on_ranks(2, each, error_and_losses, runs)
    assert found == same
    assert found[0][0] == ""
    assert len(found[0][1]) == 8
    for what, (error, losses) in zip(PLACES[1:], found[1:], strict=True):
        assert error.startswith(f"step {STEP}: memory of rank {FLIPPED} changed between two updates: "), what
        assert len(losses) == STEP
        checkpoints = tmp_path / what / "run/checkpoints"  # step 4 may have been saved after the flip
        assert (checkpoints / "latest").read_text() == "step-00000002\n"
        assert [one.name for one in checkpoints.glob("unsound-*")] == ["unsound-step-00000004"]
        assert error.endswith("; unsound-step-00000004: set aside")


def test_a_checkpoint_that_may_be_wrong_takes_no_earlier_ones_place(small_corpus, tmp_path):
    """One checkpoint is kept. That of step 4 is being written when the flip is found."""
    path = watched(tmp_path / "one", small_corpus, keep_last=1, callbacks=CHECKSUMS)
    (error, _), same = on_ranks(2, error_and_losses, path, flipping, "exp_avg")
    assert (error, _) == same
    assert error.endswith("; unsound-step-00000004: set aside")
    assert (tmp_path / "one/run/checkpoints/latest").read_text() == "step-00000002\n"


def test_any_one_flipped_bit_changes_a_checksum():
    drawn = np.random.default_rng(0)
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        whole = torch.randn(70).to(dtype)
        for start, size in ((0, 64), (1, 64), (0, 63), (1, 62), (2, 1)):
            values = whole[start : start + size].clone() if size == 1 else whole[start : start + size]
            before = checksum(values).item()
            for _ in range(20):
                element, bit = int(drawn.integers(size)), int(drawn.integers(bits))
                flip(values, element, bit)
                assert checksum(values).item() != before
                flip(values, element, bit)
            assert checksum(values).item() == before


def test_checks_are_as_many_as_take_a_thousandth_of_the_time():
    """Two readings of 12 bytes for each of a million weights, 6 FLOPs a weight and token; a byte takes 5."""
    for tokens, steps in ((100_000, 1), (20_000, 1), (19_999, 2), (2_000, 10)):
        assert interval(12_000_000, 6e6 * tokens, "cpu") == steps


# Weights that ranks compute with: the rank that has other ones is named


def differences(stage: int, precision: str) -> list[Any]:
    """Of an engine: as it is, with a changed weight on rank 1, with a changed weight of the optimizer."""
    engine = engine_of(run_config(stage, precision=precision))
    found = [difference(engine)]
    before = fingerprint_of_masters(engine)
    weights = next(iter(engine.deepspeed.module.parameters())).data
    for _ in range(2 if stage < 3 else 0):  # and back
        if dist.get_rank() == 1:
            flip(weights, 0, 3)
        found.append(difference(engine))
    if dist.get_rank() == 1:
        fragment = next(fragments(engine.deepspeed))
        flip(fragment.view(fragment.buffer.data), 0, 25)
    found.append(difference(engine))
    return [*found, before != fingerprint_of_masters(engine)]


@tables.each("stage, precision", [(2, "bf16"), *slow((1, "bf16"), (2, "fp32"), (3, "bf16"))])
def test_a_changed_weight_is_found_and_its_rank_named_where_it_can_be(stage, precision):
    told = on_ranks(2, differences, stage, precision)
    assert told[0] == told[1]
    clean, *of_model, of_optimizer, changed = told[0]
    assert clean is None
    assert not of_model or of_model.pop() is None
    assert changed
    assert of_optimizer.what.startswith("the ranks have other weights than the optimizer's: ")
    for one in of_model:
        assert one.rank == 1
        assert one.what.startswith("rank 1 has other weights than the other ranks: ")


def judged(right: list[list[int]]) -> tuple[int | None, str] | None:
    found = memory.judged(["a", "b"], torch.tensor(right, dtype=torch.bool))
    return found and (found.rank, found.what)


def test_of_three_ranks_the_odd_one_is_named():
    assert judged([[1, 1], [1, 1], [1, 1]]) is None
    said = "rank {} has other weights than the other ranks: b"
    assert judged([[1, 1], [1, 0], [1, 1]]) == (1, said.format(1))
    assert judged([[1, 0], [1, 1], [1, 0]]) == (0, said.format(0))
    assert judged([[1, 0], [1, 0]]) == (None, "the ranks have other weights than the optimizer's: b")
