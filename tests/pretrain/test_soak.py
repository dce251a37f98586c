"""Runs that are killed and go on: a short form of `python -m tests.soak_training same`, and kills of ranks by plan."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from data_pipeline.corpus import open_corpus
from data_pipeline.loading.stream import Stream
from pretrain.checkpoint.choose import newest
from tests.pretrain.checkpoint_runs import STEPS, config, recorded_training
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.recorded import largest_relative_difference, recorded_rows, scheduled_rows
from tests.pretrain.runs import losses
from tests.soak_training import soak


@pytest.mark.slow
def test_a_killed_run_comes_to_the_same_bits(small_corpus, tmp_path):
    """SIGKILL ends the supervisor during a save. No process may outlive it."""
    outcome = soak(tmp_path, small_corpus, change=False, kills=1, seed=328, seconds=120, steps=20)
    assert outcome.problems == []
    assert outcome.kills.total() > 0


@pytest.mark.slow
def test_a_run_that_is_killed_on_other_ranks_and_stages_takes_the_same_rows(whole, small_corpus, tmp_path):
    """It is killed during a save, then between two steps; then a bit of its latest checkpoint flips."""
    for ranks, stage, moment in ((2, 2, "save"), (4, 3, "step")):
        with pytest.raises(RuntimeError, match=f"rank {ranks - 1}: died"):
            on_ranks(ranks, killed_training, tmp_path, small_corpus, stage, moment)
    run = tmp_path / "adamw/run"
    damaged = newest(run) / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    assert on_ranks(1, recorded_training, tmp_path, config(tmp_path, small_corpus, "adamw", 1), None) == [0]
    schedule = scheduled_rows(Stream([open_corpus(small_corpus)], [1.0], 0, 8), 16, STEPS)
    assert recorded_rows(tmp_path / "adamw") == schedule
    found, wanted = (losses(folder / "adamw/run.yaml") for folder in (tmp_path, whole))
    assert largest_relative_difference(found, wanted) < 1e-5
    assert list((run / "checkpoints").glob(".*")) == []


def killed_training(folder: Path, corpus: Path, stage: int, moment: str) -> int:
    """The last rank kills itself as it saves for the second time, or before the eleventh step."""
    from pretrain.checkpoint import write
    from pretrain.zero.engine import Engine

    take_step, flush, saved = Engine.step, write.flush, []

    def step(engine: Engine, step: int, *arguments: object) -> object:
        if moment == "step" and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(engine, step, *arguments)

    def count(path: Path) -> None:
        saved.append(path)
        if moment == "save" and len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)

    if dist.get_rank() == dist.get_world_size() - 1:
        Engine.step, write.flush = step, count
    return recorded_training(folder, config(folder, corpus, "adamw", stage), None)
