"""Checkpoints in memory: which state a run goes on from, after what has become of the files."""

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import xxhash

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from pretrain.run import node_memory
from pretrain.run.metrics_file import read_metrics
from tests.pretrain.rank_processes import on_ranks
from tests.pretrain.runs import losses, run_file


def trained(path: Path, node: Path, stop: int | None) -> Any:
    """Trains on this rank, as a supervisor would have it. Its memory stays, since nobody removes it.

    Steps wait until the checkpoint before is stored. Otherwise one that comes too soon after it would have none.
    """
    from pretrain.checkpoint.memory import MemoryCheckpoints
    from pretrain.trainer.train import train_on

    is_due = MemoryCheckpoints.due

    def due(self: MemoryCheckpoints, step: int) -> bool:
        self.close()
        return is_due(self, step)

    MemoryCheckpoints.due = due  # type: ignore[method-assign]
    os.environ[node_memory.DIRECTORY] = str(node)
    return train_on(dist.get_rank(), dist.get_world_size(), load(path, [], RunConfig), stop)


def first_step_of(path: Path, node: Path) -> int:
    """The step that the next attempt begins with. It runs to the end."""
    assert on_ranks(2, trained, path, node, None) == [0, 0]
    rows = [row for row in read_metrics(path.parent / "run") if "train/loss" in row.metrics]
    last = max(row.attempt for row in rows)
    return min(row.step for row in rows if row.attempt == last)


@pytest.fixture(scope="module")
def cut(small_corpus, tmp_path_factory) -> Path:
    """A run that was cut after step 6: on disk is step 4, in memory steps 5 and 6 are."""
    folder = tmp_path_factory.mktemp("memory")
    path = run_file(
        folder,
        small_corpus,
        checkpoint={"every_steps": 4, "keep_last": 9, "memory_every_steps": 1},
        evaluation=[],
    )
    (folder / "node").mkdir()
    assert on_ranks(2, trained, path, folder / "node", 6) == [75, 75]
    shutil.rmtree(folder / "run/checkpoints/step-00000006")
    (folder / "run/checkpoints/latest").write_text("step-00000004\n")
    return folder


@pytest.fixture
def copy(cut, tmp_path) -> Path:
    """A copy of `cut`, whose run file names the copy."""
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run.yaml"
    path.write_text(path.read_text().replace(str(cut), str(tmp_path)))
    return path


def slots(folder: Path) -> dict[tuple[int, int], Path]:
    """The slots by rank and step."""
    found = {}
    for path in (folder / "node").glob("rank-*/shard.json"):
        shard = json.loads(path.read_text())
        found[shard["rank"], shard["train_state"]["step"]] = path.parent
    return found


def test_a_run_goes_on_from_the_newest_step_in_memory_with_the_same_losses(copy, small_corpus, tmp_path):
    assert set(slots(copy.parent)) == {(0, 5), (0, 6), (1, 5), (1, 6)}
    assert first_step_of(copy, copy.parent / "node") == 7
    whole = run_file(tmp_path / "whole", small_corpus, evaluation=[], checkpoint={"every_steps": 4})
    assert on_ranks(2, trained, whole, tmp_path / "other", None) == [0, 0]
    assert losses(copy) == losses(whole)


def test_a_flipped_bit_in_memory_is_found_and_the_step_before_is_taken(copy):
    path = slots(copy.parent)[1, 6] / "0.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    assert first_step_of(copy, copy.parent / "node") == 6


def test_weights_that_are_not_finite_in_memory_give_way_to_the_checkpoint_on_disk(copy):
    """They were so when they were copied: the checksums agree."""
    slot = slots(copy.parent)[1, 6]
    shard = json.loads((slot / "shard.json").read_text())
    content = bytearray((slot / "0.bin").read_bytes())
    content[:4] = struct.pack("<f", math.nan)
    (slot / "0.bin").write_bytes(content)
    shard["files"][0] = xxhash.xxh3_128_hexdigest(bytes(content))
    (slot / "shard.json").write_text(json.dumps(shard))
    assert first_step_of(copy, copy.parent / "node") == 5


@pytest.mark.parametrize("loss", ["a rank's memory", "the description", "another run's memory"])
def test_without_a_whole_state_in_memory_the_checkpoint_on_disk_counts(copy, loss):
    found = slots(copy.parent)
    if loss == "a rank's memory":
        for step in (5, 6):
            shutil.rmtree(found[1, step])
    elif loss == "the description":
        (found[0, 6] / "shard.json").write_text("{")
        (found[1, 5] / "shard.json").unlink()
    else:
        (copy.parent / "run/checkpoints/memory.json").unlink()
    assert first_step_of(copy, copy.parent / "node") == 5
