"""Bits that flip in a rank's memory between two updates: found before the second, with the rank; none in clean runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.trainer.callbacks.memory_at_rest import checksum, interval
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import error_of, run_file
from tests.slow import slow

STEP, FLIPPED = 5, 1  # a bit of this rank flips between the updates of this step and of the one before


def flip(values: Tensor, element: int, bit: int) -> None:
    integers = values.view(-1)[element : element + 1].view(torch.uint8)
    integers[bit // 8] ^= 1 << bit % 8


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
            batch={"global_batch_size": 16, "micro_batch_size": 4},
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
