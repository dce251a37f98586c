"""Finds the checkpoint that a run resumes from: the latest valid one on disk, or a newer one in the nodes' memory.

All ranks call these functions together.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from data_pipeline.base.atomic import commit, flush, sha256, temporary_path
from data_pipeline.base.errors import FailedError, UserError
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint import memory
from pretrain.engine.checkpoint.directory import all_steps, candidates, checkpoint_directory, set_latest
from pretrain.engine.checkpoint.index import INDEX, File, Files, MappedFile, damage, first_valid
from pretrain.engine.checkpoint.tensors import StoredTensors, verify_share
from pretrain.engine.ranks import all_gather, broadcast, first_value, on_rank_0
from pretrain.run import node_memory, watchdog
from pretrain.run.world import World

logger = logging.getLogger(__name__)
_Key = tuple[int, str]  # a step, and the checksum of its index, which differs between attempts


def newest(run: Path, last: int, world: World) -> Path | None:
    """The checkpoint that a run resumes from: the latest valid one on disk, or a newer one in memory (`newer`); None if
    there is none. Raises FailedError if all checkpoints on disk are damaged and there is none in memory.
    """
    damaged = on_disk = None
    try:
        on_disk = newest_verified(run)
    except FailedError as error:  # on all ranks
        damaged = error
    found = newer(run, on_disk, last, world)
    if found is None and damaged:
        raise damaged
    return found


def newest_verified(run: Path) -> Path | None:
    """The latest checkpoint on disk whose content is verified."""
    # on rank 0, since a network file system may show older checkpoints to other hosts
    found = on_rank_0(lambda: candidates(run), tuple[list[Path], str | None])
    return first_valid(run, _damage_on_any_rank, *found)


def _damage_on_any_rank(directory: Path) -> str | None:
    """The damage of a checkpoint, by the first rank that has found any. Each rank verifies its share of the files."""
    return first_value(damage(directory, lambda one, _: verify_share(StoredTensors(one))))


def newer(run: Path, resume: Path | None, last: int, world: World) -> Path | None:
    """The newest checkpoint in the nodes' memory if it is newer than `resume`, else `resume`.

    On one node, the checkpoint stays in memory, unless its step is `last`, at which the run ends or stops: that
    checkpoint must be on disk. On several nodes, the checkpoint is copied to the run directory, which all nodes see.
    """
    name = broadcast(memory.run_name(run / "checkpoints"), str | None)
    node = node_memory.given()
    if node and (name is None or memory.run_name(node) != name):  # of a run that was in this directory before
        shutil.rmtree(node / "checkpoints", ignore_errors=True)
        node = None
    on_disk = checkpoint_index.read(resume).step if resume else -1
    own = _held(node, on_disk, world) if node else {}
    held = [dict(one) for one in all_gather([*own.items()], list[tuple[_Key, dict[str, bool]]])]
    for key in sorted({key for one in held for key in one}, reverse=True):
        where = _holders([one.get(key, {}) for one in held])
        on_all = all(key in one for one in held)  # otherwise a node is new, or a rank has no directory in memory
        if where is None or not (on_all or len(world.nodes) > 1):
            continue
        step, _ = key
        stays = len(world.nodes) == 1 and step < last
        found = checkpoint_directory(node, step) if stays and node else _on_disk(run, node, step, where, world.rank)
        problem = _damage_on_any_rank(found) if found else f"step {step} in memory: a file is damaged"
        if problem is None:
            return found
        logger.warning("%s", problem)
    return resume


def _holders(files: list[dict[str, bool]]) -> dict[str, int] | None:
    """The last rank that has each file of a checkpoint; None if no rank has one of the files. `files`: for each rank,
    the names of files, with True if the file is there."""
    where = {name: rank for rank, told in enumerate(files) for name, there in told.items() if there}
    return where if all(told.keys() <= where.keys() for told in files) else None


def _held(node: Path, after: int, world: World) -> dict[_Key, dict[str, bool]]:
    """The checkpoints in `node` after the step `after`, each with the names of its files, and True if the file is
    there: files of other nodes' ranks may not be.

    Each rank of a node lists its share of the files.
    """
    share = slice(world.local_rank, None, len(world.on_node))
    held: dict[_Key, dict[str, bool]] = {}
    for step in (step for step in all_steps(node) if step > after):
        directory = checkpoint_directory(node, step)
        try:
            names = sorted(checkpoint_index.read(directory).files)[share]
            held[step, sha256(directory / INDEX)] = {name: (directory / name).is_file() for name in names}
        except UserError as error:
            logger.warning("%s", error)
    return held


def _on_disk(run: Path, node: Path | None, step: int, where: Mapping[str, int], rank: int) -> Path | None:
    """Copies a checkpoint to `run`, each file by the rank in `where`. Returns its new path; None if a file is
    damaged."""
    final, source = checkpoint_directory(run, step), checkpoint_directory(node or run, step)
    temporary = broadcast(temporary_path(final), Path)
    mine = [name for name, holder in where.items() if holder == rank]
    index = checkpoint_index.read(source) if mine else None
    copied: dict[str, File | MappedFile] = {}
    for name in mine:
        assert index
        if index.files[name].matches(source / name, watchdog.alive):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, temporary / name)
            flush(temporary / name)
            copied[name] = File.of(temporary / name, watchdog.alive)
    copied = dict(sorted((name, file) for one in all_gather(copied, Files) for name, file in one.items()))
    if copied.keys() != where.keys():
        return None
    if index and rank == min(where.values()):
        replace(index, files=copied).write(temporary)
        shutil.rmtree(final, ignore_errors=True)  # of the same step, from an earlier attempt; it wasn't valid
        commit(temporary, final)
        set_latest(run, step)
    dist.barrier()
    return final
