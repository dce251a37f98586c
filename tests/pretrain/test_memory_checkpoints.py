"""Checkpoints in memory: which state a run goes on from, after what has become of the files."""

import errno
import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.config_file import load
from pretrain.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.config import RunConfig
from pretrain.run import node_memory
from pretrain.run.metrics_file import read_metrics
from tests.pretrain.rank_processes import each, on_ranks
from tests.pretrain.runs import losses, run_file


def trained(path: Path, stop: int | None, node: str = "node") -> Any:
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
        patch.setenv(node_memory.DIRECTORY, str(path.parent / node))
        return train_on(dist.get_rank(), dist.get_world_size(), load(path, [], RunConfig), stop)


def rank_1(folder: Path, step: int) -> Path:
    """What rank 1 has in memory of a step."""
    return folder / f"node/checkpoints/step-{step:08d}/rank-00001.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def nothing(folder: Path) -> None:
    pass


def a_flipped_bit(folder: Path) -> None:
    flip(rank_1(folder, 6))


def a_flipped_bit_in_the_description(folder: Path) -> None:
    flip(rank_1(folder, 6).with_name("index.json"))


def weights_that_are_not_finite(folder: Path) -> None:
    """They were so when they were copied: the checksums agree."""
    path = rank_1(folder, 6)
    content = bytearray(path.read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    content[8 + header : 12 + header] = struct.pack("<f", math.nan)
    path.write_bytes(content)
    index = json.loads(path.with_name("index.json").read_text())
    index["files"][path.name]["xxh3"] = xxhash.xxh3_128_hexdigest(bytes(content))
    index["checksum"] = fingerprint({key: value for key, value in index.items() if key != "checksum"})
    path.with_name("index.json").write_text(json.dumps(index))


def a_rank_lost_between_copies(folder: Path) -> None:
    """It had taken its file from the older checkpoint, and had not completed the newer one."""
    checkpoints = rank_1(folder, 6).parent.rename(folder / "node/checkpoints/.slot-1").parent
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-00000005"]


def a_rank_without_memory(folder: Path) -> None:
    for step in (5, 6):
        rank_1(folder, step).unlink()


def lost_descriptions(folder: Path) -> None:
    rank_1(folder, 6).with_name("index.json").write_text("{")
    rank_1(folder, 5).with_suffix(".json").unlink()


def memory_of_another_run(folder: Path) -> None:
    (folder / "run/checkpoints/memory.json").unlink()


# The first step that is taken after what happened. The checkpoint on disk is of step 4.
FIRST_STEPS = {
    nothing: 7,
    a_flipped_bit: 6,
    a_flipped_bit_in_the_description: 6,
    weights_that_are_not_finite: 6,
    a_rank_lost_between_copies: 6,
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
    on_disk, held = (StoredTensors(cut.parent / place / "checkpoints/step-00000006") for place in ("run", "node"))
    for name in on_disk.shapes:
        for state in (PARAMETER, *on_disk.states(name)):
            assert torch.equal(held.whole(state, name), on_disk.whole(state, name)), (state, name)
    shutil.rmtree(on_disk.directory)
    (cut.parent / "run/checkpoints/latest").write_text("step-00000004\n")
    copies = {}
    for happened in FIRST_STEPS:
        folder = tmp_path / happened.__name__
        shutil.copytree(cut.parent, folder)
        copies[happened] = folder / "run.yaml"
        copies[happened].write_text(cut.read_text().replace(str(cut.parent), str(folder)))
        happened(folder)
    codes = on_ranks(2, each, trained, [(path, None) for path in copies.values()], seconds=280)
    assert codes == [[0] * len(copies)] * 2
    for happened, path in copies.items():
        rows = [row for row in read_metrics(path.parent / "run") if "train/loss" in row.metrics]
        first = min(row.step for row in rows if row.attempt == max(row.attempt for row in rows))
        assert first == FIRST_STEPS[happened], happened.__name__
        assert losses(path) == losses(whole), happened.__name__


def on_own_node(path: Path, nodes: list[int], stop: int | None) -> int:
    """Trains on this rank, which is alone on one of `nodes`."""
    node = nodes[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLURMD_NODENAME": f"n{node}", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
            patch.setenv(name, value)
        return trained(path, stop, f"node-{node}")


def test_the_next_node_keeps_what_a_lost_one_had_and_fewer_ranks_go_on(small_corpus, tmp_path):
    """Of four nodes, 1 and 3 are lost; 2 and 0 come after them. What 2 has of its own rank is damaged, and the older
    step serves."""
    checkpoint = {"every_steps": 100, "memory_every_steps": 1}
    path = run_file(tmp_path, small_corpus, checkpoint=checkpoint, evaluation=[])
    nodes = [tmp_path / f"node-{number}" for number in range(4)]
    assert on_ranks(4, on_own_node, path, [0, 1, 2, 3], 5) == [75] * 4
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000005")
    (tmp_path / "run/checkpoints/latest").unlink()
    for lost in (1, 3):
        shutil.rmtree(nodes[lost])
    flip(nodes[2] / "checkpoints/step-00000005/rank-00002.safetensors")
    undisturbed = losses(path)
    assert on_ranks(2, on_own_node, path, [0, 2], 6) == [75] * 2
    index = json.loads((tmp_path / "run/checkpoints/step-00000004/index.json").read_text())
    assert (index["step"], index["world_size"]) == (4, 4)
    assert all("sha256" in file for file in index["files"].values())
    rows = [row for row in read_metrics(tmp_path / "run") if row.attempt == 2 and "train/loss" in row.metrics]
    assert [row.step for row in rows] == [5, 6]
    # two ranks add gradients in another order than four
    assert rows[0].metrics["train/loss"] == pytest.approx(undisturbed[5], rel=1e-5)


def cramped(path: Path) -> tuple[int, list[str]]:
    """The exit code, and the warnings, of a run whose rank 1 has memory for one checkpoint alone."""
    from pretrain.checkpoint import memory
    from pretrain.trainer.run_report import RunReport

    allocate = memory.host_memory
    warned: list[str] = []

    def too_much(size: int, page_locked: bool, file: Path) -> torch.Tensor:
        if dist.get_rank() == 1 and file.parent.name == ".slot-1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(size, page_locked, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "host_memory", too_much)
        patch.setattr(RunReport, "warn", lambda _, line: warned.append(line))
        return trained(path, None), warned


def test_a_rank_without_room_ends_checkpoints_in_memory_on_all_ranks_and_nothing_else(small_corpus, tmp_path):
    checkpoint = {"every_steps": 100, "memory_every_steps": 1}
    path = run_file(tmp_path, small_corpus, checkpoint=checkpoint, evaluation=[])
    (tmp_path / "node").mkdir()
    warning = f"{tmp_path}/node: No space left on device: no further checkpoints in memory"
    assert on_ranks(2, cramped, path) == [(0, [warning])] * 2
    assert [one.name for one in (tmp_path / "node/checkpoints").glob("step-*")] == ["step-00000001"]
