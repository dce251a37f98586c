"""Makes a checkpoint of what the memory of the nodes holds, when a run starts again."""

import logging
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from data_pipeline.foundation.atomic import commit, temporary_path
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_json
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint import memory
from pretrain.checkpoint.choose import damage_on_any_rank
from pretrain.checkpoint.directory import SHARD, all_steps, checkpoint_directory, set_latest
from pretrain.checkpoint.index import File
from pretrain.checkpoint.memory import MemoryRun, Shard
from pretrain.checkpoint.shared_files import Place
from pretrain.checkpoint.write import write_index, write_part
from pretrain.run import node_memory, watchdog
from pretrain.zero.ranks import communication_device, from_rank_0

logger = logging.getLogger(__name__)
_Key = tuple[str, int]  # an attempt and a step


@dataclass(frozen=True)
class _Held:
    """The part of a run that a node holds: shards by attempt, step and rank, and the newest checkpoint made of such
    before."""

    attempt: MemoryRun
    shards: dict[tuple[_Key, int], Path] = field(default_factory=dict)
    made: int = -1


def newer(run: Path, resume: Path | None, rank: int, ranks: int) -> Path | None:
    """A checkpoint newer than `resume` from the nodes' memory, else `resume`. All ranks call this together.

    On one node, the checkpoint stays in memory. With several, it goes to the run directory, which they all see.
    """
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_SIZE"])
    name = from_rank_0(memory.run_name(run))
    node = node_memory.given()
    held: list[_Held | None] = [None] * ranks
    dist.all_gather_object(held, _held(node, name) if node and name and local == 0 else None)
    nodes = {number: one for number, one in enumerate(held) if one is not None}  # by their first ranks
    on_disk = checkpoint_index.read(resume).step if resume else -1
    complete = _complete(nodes)
    key = max(complete, key=lambda one: one[1], default=("", -1))
    made = nodes[0].made if per_node == ranks and 0 in nodes else -1
    if max(key[1], made) <= on_disk:
        return resume
    root = node if per_node == ranks and node else run
    found = checkpoint_directory(root, max(key[1], made))
    if key[1] > made:
        mine = {shard: first for shard, first in complete[key].items() if first == rank - local}
        paths = [nodes[first].shards[key, shard] for shard, first in mine.items() if shard % per_node == local]
        temporary = temporary_path(found, key[0][:8])
        written: list[dict[str, File]] = [{}] * ranks
        dist.all_gather_object(written, _written(temporary, paths))
        if rank == min(complete[key].values()):
            assert node is not None
            files = {name: file for one in written for name, file in one.items()}
            _complete_checkpoint(node, temporary, found, files, nodes[rank].shards[key, _any(mine)], root == run)
        dist.barrier()
    if damage := damage_on_any_rank(found, rank, ranks, communication_device()):
        logger.warning("%s; resuming from %s", damage, resume or "the start")
        return resume
    return found


def _any(shards: Mapping[int, int]) -> int:
    return next(iter(shards))


def _held(node: Path, name: str) -> _Held | None:
    """The part of the run `name` that this node holds."""
    try:
        attempt = read_json(node / memory.ATTEMPT, MemoryRun)
    except (FileNotFoundError, FailedError):
        return None
    if attempt.run != name:  # of a run that was in this directory before
        shutil.rmtree(node / "checkpoints", ignore_errors=True)
        return None
    shards = {}
    for path in node.glob(f"rank-*/{SHARD}"):
        try:
            shard = read_json(path, Shard)
            if shard.token == attempt.token and not _damage(path.parent, shard):
                shards[(shard.token, shard.train_state.step), shard.rank] = path.parent
        except (FileNotFoundError, FailedError):
            continue
    return _Held(attempt, shards, max(all_steps(node), default=-1))


def _damage(slot: Path, shard: Shard) -> bool:
    if shard.checksum != shard.own_checksum():
        return True
    for number, checksum in enumerate(shard.files):
        watchdog.alive()
        if xxhash.xxh3_128_hexdigest(_mapped(slot, number)) != checksum:
            return True
    return False


def _mapped(slot: Path, number: int) -> mmap.mmap:
    with (slot / f"{number}.bin").open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _complete(nodes: Mapping[int, _Held]) -> dict[_Key, dict[int, int]]:
    """The states that are held whole: for each rank's shard, the first rank of a node that has it."""
    sizes = {one.attempt.token: one.attempt.world_size for one in nodes.values()}
    where: dict[_Key, dict[int, int]] = {}
    for first, one in nodes.items():
        for key, rank in one.shards:
            where.setdefault(key, {}).setdefault(rank, first)
    return {key: found for key, found in where.items() if len(found) == sizes[key[0]]}


def _written(directory: Path, slots: list[Path]) -> dict[str, File]:
    """Writes the shards in `slots` as parts of a checkpoint; returns the descriptions of their files."""
    files: dict[str, File] = {}
    for slot in slots:
        shard = read_json(slot / SHARD, Shard)
        mapped = [_mapped(slot, number) for number in range(len(shard.files))]
        tensors = {name: _tensor(mapped, place) for name, place in shard.tensors.items()}
        files |= write_part(directory, shard.rank, tensors, shard.fragments, watchdog.alive)
    return files


def _tensor(mapped: list[mmap.mmap], place: Place) -> Tensor:
    count = torch.Size(place.shape).numel()
    if not count:
        return torch.empty(place.shape)
    flat = torch.frombuffer(mapped[place.file], dtype=torch.float32, count=count, offset=place.offset)
    return flat.view(place.shape)


def _complete_checkpoint(
    node: Path, temporary: Path, final: Path, files: dict[str, File], slot: Path, on_disk: bool
) -> None:
    """Adds to the ranks' files what they have in common, and gives the checkpoint its name."""
    attempt, shard = read_json(node / memory.ATTEMPT, MemoryRun), read_json(slot / SHARD, Shard)
    shutil.copytree(node / memory.COMMON, temporary, dirs_exist_ok=True)
    state = shard.train_state
    write_index(
        temporary,
        files,
        step=state.step,
        position=state.position,
        consumed=shard.consumed,
        skipped=state.skipped,
        health=state.health,
        unlogged=state.unlogged,
        callbacks=state.callbacks,
        config_fingerprint=attempt.config_fingerprint,
        identity=attempt.identity,
        world_size=attempt.world_size,
        zero_stage=attempt.zero_stage,
    )
    shutil.rmtree(final, ignore_errors=True)  # of the same step, from an attempt before; it wasn't valid
    commit(temporary, final)
    if on_disk:
        set_latest(final.parent.parent, state.step)
        return
    for step in all_steps(node):
        if step != state.step:
            shutil.rmtree(checkpoint_directory(node, step), ignore_errors=True)
