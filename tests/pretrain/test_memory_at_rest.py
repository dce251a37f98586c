"""Bits that flip in a rank's memory between two updates: found before the second, with the rank; none in clean runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from pretrain.trainer.callbacks.weights_in_memory import checksum, interval
from tests import tables
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import error_of, run_file
from tests.pretrain.small_runs import engine_of, flip, run_config
from tests.slow import slow

STEP, FLIPPED = 5, 1  # a bit of this rank flips between the updates of this step and of the one before


def error_and_losses(path: Path, what: str) -> tuple[str, list[float]]:
    """The error of a run in which a bit flips in `what` this rank has, and the losses of its steps."""
    from pretrain.run import node_memory
    from pretrain.zero.deepspeed_private import flat_buffers, local_weights, wrapped
    from pretrain.zero.engine import Engine

    right, losses = Engine.step, []

    def step(self: Any, number: int, *arguments: Any) -> Any:
        if number + 1 == STEP and dist.get_rank() == FLIPPED:
            engine = self.deepspeed
            if what == "weights":
                weights = local_weights(engine)
                assert weights is not None
                flip(max((values for values, *_ in weights), key=len), 3, 14)
            elif what == "the optimizer's weights":
                flip(flat_buffers(engine)[0].tensor, 3, 20)
            elif what:
                flip(next(iter(wrapped(engine).state.values()))[what], 3, 20)
        outcome = right(self, number, *arguments)
        if number == 0:  # there are steps of the check at a start before
            losses.clear()
        losses.append(outcome.loss)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(node_memory.DIRECTORY, str(path.parent / "node"))
        patch.setattr(Engine, "step", step)
        return error_of(path), losses


PLACES = ("", "weights", "the optimizer's weights", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16"), *slow((2, "bf16"), (3, "fp32"))])
def test_a_bit_that_flips_between_updates_is_found_before_the_second(stage, precision, small_corpus, tmp_path):
    runs = []
    for what in PLACES:
        path = run_file(
            tmp_path / (what or "clean"),
            small_corpus,
            stage,
            precision=precision,
            faults={"checksum_every_steps": 1, "replay_every_steps": None},
            checkpoint={"every_steps": 2, "keep_last": 9, "memory_every_steps": 1},
        )
        (path.parent / "node").mkdir()
        runs.append((path, what))
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


# Fingerprints of weights: parts add up, a changed bit shows, and the rank that has it is named


@tables.each("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_parts_are_those_of_the_whole(dtype, monkeypatch):
    from pretrain.trainer.callbacks import weights_in_memory
    from pretrain.trainer.callbacks.weights_in_memory import sums

    monkeypatch.setattr(weights_in_memory, "_PART", 1 << 10)
    values = torch.randn(3001, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = sums(values)
    parts = [(0, 7), (7, 1500), (1500, len(values))]
    assert torch.equal(sum(sums(values[first:last], first) for first, last in parts), whole)
    for bit in range(8 * values.element_size()):
        flipped = values.clone()
        flip(flipped, 2999, bit)
        assert not torch.equal(sums(flipped), whole), bit
    swapped = values.clone()
    swapped[[5, 6]] = values[[6, 5]]
    assert not torch.equal(sums(swapped), whole)


def differences(stage: int, precision: str) -> list[Any]:
    """Of an engine: as it is, with a changed weight on rank 1, with a changed weight of the optimizer."""
    from pretrain.trainer.callbacks.weights_in_memory import difference, of_masters
    from pretrain.zero.deepspeed_private import in_memory

    engine = engine_of(run_config(stage, precision=precision))
    found = [difference(engine)]
    before = of_masters(engine)
    weights = next(iter(engine.deepspeed.module.parameters())).data
    for _ in range(2 if stage < 3 else 0):  # and back
        if dist.get_rank() == 1:
            flip(weights, 0, 3)
        found.append(difference(engine))
    if dist.get_rank() == 1:
        fragment = next(in_memory(engine.deepspeed))
        flip(fragment.view(fragment.buffer.data), 0, 25)
    found.append(difference(engine))
    return [*found, before != of_masters(engine)]


@tables.each("stage, precision", [(2, "bf16"), *slow((1, "bf16"), (2, "fp32"), (3, "bf16"))])
def test_a_changed_weight_is_found_and_its_rank_named_where_it_can_be(stage, precision):
    told = on_ranks(2, differences, stage, precision)
    assert told[0] == told[1]
    clean, *of_model, of_optimizer, changed = told[0]
    assert clean is None
    assert not of_model or of_model.pop() is None
    assert changed
    if precision == "bf16":
        assert of_optimizer.what.startswith("the ranks compute with other weights than the optimizer's: ")
        for one in of_model:
            assert one.rank == 1
            assert one.what.startswith("rank 1 computes with other weights than the others: ")
    else:
        for one in [*of_model, of_optimizer]:
            assert one.rank is None
            assert one.what.startswith("the ranks compute with different weights: ")


def judged(right: list[list[int]], shared: bool) -> tuple[int | None, str] | None:
    from pretrain.trainer.callbacks import weights_in_memory

    found = weights_in_memory.judged(["a", "b"], torch.tensor(right, dtype=torch.bool), shared)
    return found and (found.rank, found.what)


def test_of_three_ranks_the_odd_one_is_named_whether_or_not_its_optimizer_holds_the_weight():
    assert judged([[1, 1], [1, 1], [1, 1]], True) is None
    said = "rank {} computes with other weights than the others: b"
    assert judged([[1, 1], [1, 0], [1, 1]], True) == (1, said.format(1))
    assert judged([[1, 0], [1, 1], [1, 0]], True) == (1, said.format(1))
    assert judged([[1, 0], [1, 1], [1, 0]], False) == (0, said.format(0))


def loaded_wrong(path: Path) -> str:
    """The error of a run whose weights change a bit as they are loaded."""
    from pretrain.trainer import callback, train
    from pretrain.zero.deepspeed_private import in_memory

    assert train.train_on(dist.get_rank(), dist.get_world_size(), load(path, [], RunConfig), 4) == 75
    right = callback.restore

    def wrong(engine: Any, directory: Path) -> None:
        right(engine, directory)
        fragment = next(in_memory(engine.deepspeed))
        flip(fragment.view(fragment.buffer.data), 0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "restore", wrong)
        return error_of(path)


def test_weights_that_change_as_they_are_loaded_end_the_start(small_corpus, tmp_path):
    (error,) = on_ranks(1, loaded_wrong, run_file(tmp_path, small_corpus, evaluation=[]))
    assert error.endswith("step-00000004: its weights aren't those that the run had when it saved them")
