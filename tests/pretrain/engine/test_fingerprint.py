"""Fingerprints of weights: parts add up, a changed bit shows, and what is loaded is what was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import FailedError
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import engine_state
from pretrain.engine.ranks import joined_world
from tests.support import tables
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file
from tests.support.small_runs import flip


@tables.each("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_parts_are_those_of_the_whole(dtype):
    values = torch.randn(2_100_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = engine_state.fingerprint(values)
    parts = [(0, 7), (7, 1_500_000), (1_500_000, len(values))]
    assert torch.equal(sum(engine_state.fingerprint(values[first:last], first) for first, last in parts), whole)
    for bit in range(8 * values.element_size()):
        flipped = values.clone()
        flip(flipped, 2_100_001, bit)
        assert not torch.equal(engine_state.fingerprint(flipped), whole), bit
    swapped = values.clone()
    swapped[[5, 6]] = values[[6, 5]]
    assert not torch.equal(engine_state.fingerprint(swapped), whole)


def loaded_wrong(path: Path) -> None:
    """A run whose weights change a bit as they are loaded ends."""
    from pretrain.engine.deepspeed_private import fragments
    from pretrain.training import run, trainer

    assert run.train_in_group(joined_world(), load(path, [], RunConfig), 4) == 75
    right = trainer.restore

    def wrong(engine: Any, directory: Path) -> None:
        right(engine, directory)
        fragment = next(fragments(engine.deepspeed))
        flip(fragment.view(fragment.buffer.data), 0, 0)

    said = "step-00000004: its weights differ from those that the run saved$"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "restore", wrong)
        with pytest.raises(FailedError, match=said):
            run.train_in_group(joined_world(), load(path, [], RunConfig))


def test_weights_that_change_as_they_are_loaded_end_the_start(small_corpus, tmp_path):
    on_ranks(1, loaded_wrong, run_file(tmp_path, small_corpus, evaluation=[]))
