"""Finds the checkpoint that a run goes on from: the latest valid one on disk, or a newer one in the nodes' memory.

All ranks call these functions together.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from data_pipeline.foundation.atomic import commit, flush, sha256, temporary_path
from data_pipeline.foundation.errors import UserError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint import memory
from pretrain.checkpoint.directory import all_steps, candidates, checkpoint_directory, damage, first_valid, set_latest
from pretrain.checkpoint.index import INDEX, File, MappedFile
from pretrain.checkpoint.tensors import StoredTensors
from pretrain.run import node_memory, watchdog
from pretrain.zero.ranks import from_rank_0, of_all_ranks, on_rank_0

logger = logging.getLogger(__name__)
_Key = tuple[int, str]  # a step, and the checksum of its index: attempts may differ


def newest_verified(run: Path) -> Path | None:
    """The latest checkpoint on disk whose content is verified."""
    found = on_rank_0(lambda: candidates(run))  # a network file system may show other hosts older ones
    return first_valid(run, _damage_on_any_rank, found)


def _damage_on_any_rank(directory: Path) -> str | None:
    """The damage of a checkpoint, of which each rank verifies its share."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    own = damage(directory, lambda one, _: StoredTensors(one).verify(share, watchdog.alive))
    on_any = any(of_all_ranks(own is not None))
    return own or (f"{directory}: damaged, as another rank found" if on_any else None)


def newer(run: Path, resume: Path | None) -> Path | None:
    """A checkpoint newer than `resume` from the nodes' memory, else `resume`.

    On one node, the checkpoint stays in memory. With several, it goes to the run directory, which they all see.
    """
    name = from_rank_0(memory.run_name(run / "checkpoints"))
    node = node_memory.given()
    if node and (name is None or memory.run_name(node) != name):  # of a run that was in this directory before
        shutil.rmtree(node / "checkpoints", ignore_errors=True)
        node = None
    on_disk = checkpoint_index.read(resume).step if resume else -1
    held = of_all_ranks(_held(node, on_disk) if node else {})
    for key in sorted({key for one in held for key in one}, reverse=True):
        where: dict[str, int] = {}
        for holder, one in enumerate(held):
            where |= {name: holder for name in one[key][1] if name not in where} if key in one else {}
        if any(key in one and len(where) < one[key][0] for one in held):
            continue
        if int(os.environ["LOCAL_SIZE"]) == dist.get_world_size() and node:
            found = checkpoint_directory(node, key[0])
        else:
            found = _on_disk(run, node, key[0], where)
        if problem := _damage_on_any_rank(found):
            logger.warning("%s", problem)
        else:
            return found
    return resume


def _held(node: Path, after: int) -> dict[_Key, tuple[int, list[str]]]:
    """The checkpoints after that step in `node`: the number of files, and those that this rank has found sound.

    Each rank of a node checks its share of them.
    """
    share = slice(int(os.environ["LOCAL_RANK"]), None, int(os.environ["LOCAL_SIZE"]))
    held: dict[_Key, tuple[int, list[str]]] = {}
    for step in (step for step in all_steps(node) if step > after):
        directory = checkpoint_directory(node, step)
        try:
            files = checkpoint_index.read(directory).files
            sound = [name for name in sorted(files)[share] if _is_sound(directory / name, files[name])]
            held[step, sha256(directory / INDEX)] = len(files), sound
        except UserError as error:
            logger.warning("%s", error)
    return held


def _is_sound(path: Path, expected: File | MappedFile) -> bool:
    if not path.is_file():  # as those of other nodes' ranks
        return False
    sound = path.stat().st_size == expected.bytes and expected.matches(path, watchdog.alive)
    if not sound:
        logger.warning("%s: damaged: its checksum differs from %s's", path, INDEX)
    return sound


def _on_disk(run: Path, node: Path | None, step: int, where: Mapping[str, int]) -> Path:
    """Copies a checkpoint to `run`, each file by the rank that `where` names; its new path."""
    final, rank = checkpoint_directory(run, step), dist.get_rank()
    temporary = from_rank_0(temporary_path(final))
    files: dict[str, File] = {}
    for name in [name for name, holder in where.items() if holder == rank]:
        assert node
        watchdog.alive()
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint_directory(node, step) / name, temporary / name)
        flush(temporary / name)
        files[name] = File((temporary / name).stat().st_size, sha256(temporary / name, watchdog.alive))
    files = dict(sorted((name, file) for one in of_all_ranks(files) for name, file in one.items()))
    if node and rank == min(where.values()):
        index = checkpoint_index.read(checkpoint_directory(node, step))
        (temporary / INDEX).write_text(replace(index, files={**files}).as_json())
        shutil.rmtree(final, ignore_errors=True)  # of the same step, from an attempt before; it wasn't valid
        commit(temporary, final)
        set_latest(run, step)
    dist.barrier()
    return final
