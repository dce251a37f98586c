"""Fingerprints of weights: parts add up, a changed bit shows, and the rank that has it is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.runs import error_of, run_file
from tests.pretrain.small_runs import engine_of, run_config
from tests.slow import slow
from tests.tables import each


@each("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_parts_are_those_of_the_whole(dtype, monkeypatch):
    from pretrain.trainer.callbacks import fingerprints
    from pretrain.trainer.callbacks.fingerprints import sums

    monkeypatch.setattr(fingerprints, "_PART", 1 << 10)
    values = torch.randn(3001, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = sums(values)
    parts = [(0, 7), (7, 1500), (1500, len(values))]
    assert torch.equal(sum(sums(values[first:last], first) for first, last in parts), whole)
    for bit in range(8 * values.element_size()):
        flipped = values.clone()
        integers = torch.int16 if dtype is torch.bfloat16 else torch.int32
        flipped[2999:3000].view(integers).bitwise_xor_(-(1 << bit) if bit == 31 else 1 << bit)
        assert not torch.equal(sums(flipped), whole), bit
    swapped = values.clone()
    swapped[[5, 6]] = values[[6, 5]]
    assert not torch.equal(sums(swapped), whole)


def differences(stage: int, precision: str) -> list[Any]:
    """Of an engine: as it is, with a changed weight on rank 1, with a changed weight of the optimizer."""
    from pretrain.trainer.callbacks.fingerprints import difference, of_masters
    from pretrain.zero.deepspeed_private import in_memory

    engine = engine_of(run_config(stage, precision=precision))
    found = [difference(engine)]
    before = of_masters(engine)
    if stage < 3:
        weight = next(iter(engine.deepspeed.module.parameters())).data.view(-1)[:1]
        integers = torch.int16 if precision == "bf16" else torch.int32
        flip = (1 << 3) if dist.get_rank() == 1 else 0
        weight.view(integers).bitwise_xor_(flip)
        found.append(difference(engine))
        weight.view(integers).bitwise_xor_(flip)
    if dist.get_rank() == 1:
        fragment = next(in_memory(engine.deepspeed))
        fragment.view(fragment.buffer.data)[:1].view(torch.int32).bitwise_xor_(1 << 25)
    found.append(difference(engine))
    return [*found, before != of_masters(engine)]


@each("stage, precision", [(2, "bf16"), *slow((1, "bf16"), (2, "fp32"), (3, "bf16"))])
def test_a_changed_weight_is_found_and_its_rank_named_where_it_can_be(stage, precision):
    told = on_ranks(2, differences, stage, precision)
    assert told[0] == told[1]
    clean, *of_model, of_optimizer, changed = told[0]
    assert clean is None
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
    from pretrain.trainer.callbacks import fingerprints

    found = fingerprints.judged(["a", "b"], torch.tensor(right, dtype=torch.bool), shared)
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
        fragment.view(fragment.buffer.data)[:1].view(torch.int32).bitwise_xor_(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "restore", wrong)
        return error_of(path)


def test_weights_that_change_as_they_are_loaded_end_the_start(small_corpus, tmp_path):
    (error,) = on_ranks(1, loaded_wrong, run_file(tmp_path, small_corpus, evaluation=[]))
    assert error.endswith("step-00000004: its weights aren't those that the run had when it saved them")
