"""Checkpoints in memory: which state a run resumes from, and whose the memory is."""

import errno
import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import xxhash

from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.engine.checkpoint.directory import release_memory, remove_left_in_memory
from pretrain.engine.checkpoint.index import is_valid
from pretrain.engine.checkpoint.tensors import PARAMETER, StoredTensors
from pretrain.engine.ranks import joined_world
from pretrain.run import node_memory
from pretrain.run.metrics_file import read_metrics
from tests.support.checkpoint_runs import flip, rewrite
from tests.support.rank_processes import each, on_ranks
from tests.support.runs import losses, run_file
from tests.support.small_runs import engine_of, micro_batches, own_layout, row_offsets, run_config
from tests.support.steps import store_each


def trained(path: Path, stop: int | None, node: str = "node") -> Any:
    """Trains on this rank, as a supervisor would have it. Its memory stays, since nobody removes it.

    Steps wait until the checkpoint before is stored. Otherwise one that comes too soon after it would have none.
    """
    from pretrain.engine.checkpoint import memory
    from pretrain.training.run import train_in_group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.MemoryCheckpoints, "due", memory.MemoryCheckpoints.due)  # undone after this run
        store_each(memory)
        patch.setenv(node_memory.DIRECTORY, str(path.parent / node))
        return train_in_group(joined_world(), load(path, [], RunConfig), stop)


def rank_1(folder: Path, step: int) -> Path:
    """What rank 1 has in memory of a step."""
    return folder / f"node/checkpoints/step-{step:08d}/rank-00001.safetensors"


def weights_that_are_not_finite(folder: Path) -> None:
    """They were so when they were copied: the checksums agree."""
    path = rank_1(folder, 6)
    content = bytearray(path.read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    content[8 + header : 12 + header] = struct.pack("<f", math.nan)
    path.write_bytes(content)
    of_content = {"xxh3": xxhash.xxh3_128_hexdigest(bytes(content))}
    rewrite(path.with_name("index.json"), lambda values: values["files"][path.name].update(of_content))


def lose_descriptions(folder: Path) -> None:
    rank_1(folder, 6).with_name("index.json").write_text("{")
    rank_1(folder, 5).with_suffix(".json").unlink()


# What happened, and the first step that is taken after it. The checkpoint on disk is of step 4.
HAPPENED: dict[str, tuple[Callable[[Path], object], int]] = {
    "nothing": (lambda folder: None, 7),
    "a flipped bit": (lambda folder: flip(rank_1(folder, 6)), 6),
    "a flipped bit in the description": (lambda folder: flip(rank_1(folder, 6).with_name("index.json")), 6),
    "weights that are not finite": (weights_that_are_not_finite, 6),
    # the rank had taken its file from the older checkpoint, and had not completed the newer one
    "a rank lost between copies": (
        lambda folder: rank_1(folder, 6).parent.rename(folder / "node/checkpoints/.slot-1"),
        6,
    ),
    "a rank without memory": (lambda folder: [rank_1(folder, step).unlink() for step in (5, 6)], 5),
    "lost descriptions": (lose_descriptions, 5),
    "memory of another run": (lambda folder: (folder / "run/checkpoints/memory.json").unlink(), 5),
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
    for name, (happen, _) in HAPPENED.items():
        folder = tmp_path / name
        shutil.copytree(cut.parent, folder)
        copies[name] = folder / "run.yaml"
        copies[name].write_text(cut.read_text().replace(str(cut.parent), str(folder)))
        happen(folder)
    stays = tmp_path / "stays/run.yaml"
    shutil.copytree(cut.parent, stays.parent)
    stays.write_text(cut.read_text().replace(str(cut.parent), str(stays.parent)))
    starts = [(stays, 6), *((path, None) for path in copies.values())]
    assert on_ranks(2, each, trained, starts, seconds=280) == [[75, *[0] * len(copies)]] * 2
    assert is_valid(stays.parent / "run/checkpoints/step-00000006")  # a run that stops is on disk
    assert max(losses(stays)) == 6
    for name, path in copies.items():
        rows = [row for row in read_metrics(path.parent / "run") if "train/loss" in row.metrics]
        first = min(row.step for row in rows if row.attempt == max(row.attempt for row in rows))
        assert first == HAPPENED[name][1], name
        assert losses(path) == losses(whole), name


def on_own_node(path: Path, nodes: list[int], stop: int | None) -> int:
    """Trains on this rank, which is on one of `nodes`. LOCAL_RANK is 0, as where each rank sees a GPU of its own."""
    node = nodes[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        of_node = {"SLURMD_NODENAME": f"n{node}", "LOCAL_RANK": "0", "LOCAL_SIZE": str(nodes.count(node))}
        for name, value in of_node.items():
            patch.setenv(name, value)
        return trained(path, stop, f"node-{node}")


def test_ranks_of_a_node_that_each_see_their_own_gpu_share_its_memory(small_corpus, tmp_path):
    """One of them makes its directories, and each finds its share of the files there."""
    checkpoint = {"every_steps": 100, "memory_every_steps": 1}
    path = run_file(tmp_path, small_corpus, checkpoint=checkpoint, evaluation=[])
    (tmp_path / "node-0").mkdir()
    assert on_ranks(2, on_own_node, path, [0, 0], 2) == [75] * 2
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    (tmp_path / "run/checkpoints/latest").unlink()
    assert on_ranks(2, on_own_node, path, [0, 0], 3) == [75] * 2
    rows = [row for row in read_metrics(tmp_path / "run") if row.attempt == 2 and "train/loss" in row.metrics]
    assert [row.step for row in rows] == [3]  # step 2 is in memory alone


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


def cramped(path: Path, nodes: int) -> tuple[int, list[str]]:
    """The exit code, and the warnings, of a run whose rank 1 has memory for one checkpoint alone; on two nodes, for the
    other rank's."""
    from pretrain.engine.checkpoint import memory
    from pretrain.training.run_report import RunReport

    allocate = memory.memory_file
    warned: list[str] = []

    def too_much(file: Path, size: int) -> torch.Tensor:
        if dist.get_rank() == 1 and (file.parent.name, file.stem) == (".slot-1", f"rank-{2 - nodes:05d}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(file, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "memory_file", too_much)
        patch.setattr(RunReport, "warn", lambda _, line: warned.append(line))
        code = trained(path, None) if nodes == 1 else on_own_node(path, [0, 1], None)
        return code, [line.partition(": ")[2] for line in warned]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_without_room_ends_checkpoints_in_memory_on_all_ranks_and_nothing_else(small_corpus, tmp_path, nodes):
    """Its own, or those that it would keep for a rank of another node."""
    checkpoint = {"every_steps": 100, "memory_every_steps": 1}
    path = run_file(tmp_path, small_corpus, run={"max_steps": 4}, checkpoint=checkpoint, evaluation=[])
    folders = [tmp_path / name for name in (["node"] if nodes == 1 else ["node-0", "node-1"])]
    for folder in folders:
        folder.mkdir()
    warning = "rank 1: No space left on device: no further checkpoints in memory"
    assert on_ranks(2, cramped, path, nodes) == [(0, [warning])] * 2
    for folder in folders:
        assert [one.name for one in (folder / "checkpoints").glob("step-*")] == ["step-00000001"]


# The directory of a run in the memory of a node: whose it may be, and how long it stays


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run's directory, on a node whose memory is a folder."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(node_memory, "_MEMORY", tmp_path / "memory")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("spoil", ["mode", "link", "owner"])
def test_a_directory_that_others_can_write_to_or_that_is_a_link_is_never_used(run, tmp_path, spoil):
    found = node_memory.path(run)
    assert found is not None
    if spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        found.symlink_to(tmp_path / "elsewhere")
    else:
        found.mkdir(mode=0o700)
        if spoil == "mode":
            found.chmod(0o777)
        elif os.getuid() == 0:
            os.chown(found, 12345, -1)
        else:
            found.chmod(0o750)
    assert node_memory.path(run) is None
    ranks = node_memory.for_ranks(run)
    assert ranks.parent not in (found, tmp_path / "elsewhere")
    assert not list(found.iterdir())


def held(run: Path, step: int) -> Path:
    """The directory in memory, with a checkpoint of `step`, and without a supervisor that lives."""
    node = node_memory.for_ranks(run).parent
    for ranks in node.glob("ranks-*"):
        ranks.rmdir()
    (node / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (node / "checkpoints/.slot-1").mkdir()
    return node


def test_what_is_newer_than_the_disk_outlives_the_run(run):
    node = held(run, 40)
    for on_disk in (None, 30):
        if on_disk:
            (run / f"checkpoints/step-{on_disk:08d}").mkdir(parents=True)
        assert "step 40 is in memory" in (release_memory(run) or "")
        assert node.exists()
    (run / "checkpoints/step-00000040").mkdir()
    ranks = node_memory.for_ranks(run)  # the same command has begun again
    assert release_memory(run) is None
    assert ranks.is_dir()
    ranks.rmdir()
    assert release_memory(run) is None
    assert not node.exists()


def test_the_next_run_removes_what_a_killed_one_has_left_unless_it_is_newer_than_its_disk(run, tmp_path):
    newer, gone, used = held(run, 40), held(tmp_path / "gone", 40), held(tmp_path / "used", 40)
    (used / f"ranks-{os.getpid()}-x").mkdir()
    remove_left_in_memory()
    assert (newer.exists(), gone.exists(), used.exists()) == (True, False, True)
    (run / "checkpoints/step-00000041").mkdir(parents=True)
    remove_left_in_memory()
    assert not newer.exists()


@pytest.mark.parametrize("remove", [lambda _: remove_left_in_memory(), release_memory])
def test_an_attempt_that_begins_while_its_directory_is_removed_keeps_its_own(run, monkeypatch, remove):
    """It begins once the other supervisor has seen that nobody uses the directory."""
    held(run, 40)
    (run / "checkpoints/step-00000040").mkdir(parents=True)
    used, made = node_memory.is_used, list[Path]()
    beginning = threading.Thread(target=lambda: made.append(node_memory.for_ranks(run)))

    def is_used(node: Path) -> bool:
        found = used(node)
        beginning.start()
        beginning.join(0.5)  # it waits for the lock; without one, it would be done
        return found

    with monkeypatch.context() as patch:
        patch.setattr(node_memory, "is_used", is_used)
        remove(run)
    beginning.join()
    assert made[0].is_dir()


def by_way_of_other_memory(node: Path) -> list[bytes]:
    """The two files of a rank's state: copied right into the memory file system, and first into other memory."""
    from pretrain.engine.checkpoint.engine_state import PinnedStaging
    from pretrain.engine.checkpoint.memory import _Slot

    engine, layout = engine_of(run_config(2)), own_layout()
    engine.step(0, row_offsets(layout, 0), micro_batches(layout, 0))
    slots = [_Slot(engine, node, 0, number, copies) for number, copies in enumerate((None, PinnedStaging(engine)))]
    for slot in slots:
        slot.directory.mkdir(parents=True)
        slot.describe(0, slot.copies.take())
    return [(slot.directory / "rank-00000.safetensors").read_bytes() for slot in slots]


def test_a_copy_by_way_of_page_locked_memory_is_the_same_file(tmp_path):
    """As a GPU makes it, here in memory that isn't locked."""
    direct, other = on_ranks(1, by_way_of_other_memory, tmp_path)[0]
    assert direct == other
    assert len(safetensors.torch.load(direct)) > 0
