"""Checkpoints in memory: which state a run goes on from, after what has become of the files."""

import json
import math
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
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import losses, run_file


def trained(path: Path, stop: int | None) -> Any:
    """Trains on this rank, as a supervisor would have it. Its memory stays, since nobody removes it.

    Steps wait until the checkpoint before is stored. Otherwise one that comes too soon after it would have none.
    """
    from pretrain.checkpoint.memory import MemoryCheckpoints
    from pretrain.trainer.train import train_on

    is_due = MemoryCheckpoints.due

    def due(self: MemoryCheckpoints, step: int) -> bool:
        self.close()
        return is_due(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCheckpoints, "due", due)
        patch.setenv(node_memory.DIRECTORY, str(path.parent / "node"))
        return train_on(dist.get_rank(), dist.get_world_size(), load(path, [], RunConfig), stop)


Slots = dict[tuple[int, int], Path]  # by rank and step


def slots(folder: Path) -> Slots:
    found = {}
    for path in (folder / "node").glob("rank-*/shard.json"):
        shard = json.loads(path.read_text())
        found[shard["rank"], shard["train_state"]["step"]] = path.parent
    return found


def nothing(folder: Path, found: Slots) -> None:
    assert set(found) == {(0, 5), (0, 6), (1, 5), (1, 6)}


def a_flipped_bit(folder: Path, found: Slots) -> None:
    path = found[1, 6] / "0.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def a_flipped_bit_in_the_description(folder: Path, found: Slots) -> None:
    path = found[1, 6] / "shard.json"
    shard = json.loads(path.read_text())
    max(shard["tensors"].values(), key=lambda place: place["offset"])["offset"] ^= 64
    path.write_text(json.dumps(shard))


def weights_that_are_not_finite(folder: Path, found: Slots) -> None:
    """They were so when they were copied: the checksums agree."""
    slot = found[1, 6]
    shard = json.loads((slot / "shard.json").read_text())
    content = bytearray((slot / "0.bin").read_bytes())
    content[:4] = struct.pack("<f", math.nan)
    (slot / "0.bin").write_bytes(content)
    shard["files"][0] = xxhash.xxh3_128_hexdigest(bytes(content))
    shard["checksum"] = xxhash.xxh3_128_hexdigest(json.dumps({**shard, "checksum": ""}).encode())
    (slot / "shard.json").write_text(json.dumps(shard))


def a_rank_without_memory(folder: Path, found: Slots) -> None:
    for step in (5, 6):
        shutil.rmtree(found[1, step])


def lost_descriptions(folder: Path, found: Slots) -> None:
    (found[0, 6] / "shard.json").write_text("{")
    (found[1, 5] / "shard.json").unlink()


def memory_of_another_run(folder: Path, found: Slots) -> None:
    (folder / "run/checkpoints/memory.json").unlink()


# The first step that is taken after what happened. The checkpoint on disk is of step 4.
FIRST_STEPS = {
    nothing: 7,
    a_flipped_bit: 6,
    a_flipped_bit_in_the_description: 6,
    weights_that_are_not_finite: 5,
    a_rank_without_memory: 5,
    lost_descriptions: 5,
    memory_of_another_run: 5,
}


def test_a_run_goes_on_from_the_newest_sound_step_with_the_same_losses(small_corpus, tmp_path):
    checkpoint = {"every_steps": 4, "keep_last": 9, "memory_every_steps": 1}
    cut = run_file(tmp_path / "cut", small_corpus, checkpoint=checkpoint, evaluation=[])
    whole = run_file(tmp_path / "whole", small_corpus, checkpoint={"every_steps": 4}, evaluation=[])
    for path in (cut, whole):
        (path.parent / "node").mkdir()
    assert on_ranks(2, each, trained, [(cut, 6), (whole, None)]) == [[75, 0]] * 2
    shutil.rmtree(cut.parent / "run/checkpoints/step-00000006")
    (cut.parent / "run/checkpoints/latest").write_text("step-00000004\n")
    copies = {}
    for happened in FIRST_STEPS:
        folder = tmp_path / happened.__name__
        shutil.copytree(cut.parent, folder)
        copies[happened] = folder / "run.yaml"
        copies[happened].write_text(cut.read_text().replace(str(cut.parent), str(folder)))
        happened(folder, slots(folder))
    codes = on_ranks(2, each, trained, [(path, None) for path in copies.values()], seconds=280)
    assert codes == [[0] * len(copies)] * 2
    for happened, path in copies.items():
        rows = [row for row in read_metrics(path.parent / "run") if "train/loss" in row.metrics]
        first = min(row.step for row in rows if row.attempt == max(row.attempt for row in rows))
        assert first == FIRST_STEPS[happened], happened.__name__
        assert losses(path) == losses(whole), happened.__name__
