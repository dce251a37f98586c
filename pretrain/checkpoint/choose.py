"""Finds the checkpoint that a run resumes from: the latest valid one."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.directory import candidates, step_in_name
from pretrain.run import watchdog

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def checkpoint_in(path: Path) -> Path:
    """`path` if it is a checkpoint, else the newest valid checkpoint of the run directory `path`.

    Raises FailedError if the run has checkpoints but none of them is valid.
    """
    return path if (path / checkpoint_index.INDEX).exists() else newest(path) or path


def newest(run: Path) -> Path | None:
    """The latest checkpoint whose files all exist with the right size; None if the run has no checkpoint.

    Raises FailedError if the run has checkpoints but none of them is valid.
    """
    return _first_valid(run, lambda one: _damage(one, checkpoint_index.missing_or_short), candidates(run))


def is_valid(directory: Path) -> bool:
    """True if every file of a checkpoint has the content that was written."""
    return _damage(directory, checkpoint_index.verify) is None


def newest_verified(run: Path, rank: int, ranks: int, device: "torch.device") -> Path | None:
    """The latest checkpoint whose content is verified. Each rank verifies its share; all must call it together."""
    from pretrain.zero.ranks import on_rank_0  # torch takes a second, and the launcher looks for checkpoints too

    found = on_rank_0(lambda: candidates(run))  # a network file system may show other hosts older ones
    return _first_valid(run, lambda one: damage_on_any_rank(one, rank, ranks, device), found)


def damage_on_any_rank(directory: Path, rank: int, ranks: int, device: "torch.device") -> str | None:
    """The damage of a checkpoint, of which each rank verifies its share; all must call it together."""
    import torch  # takes a second
    import torch.distributed as dist

    from pretrain.checkpoint.tensors import StoredTensors

    own = _damage(directory, lambda one, _: StoredTensors(one).verify(slice(rank, None, ranks), watchdog.alive))
    damaged = torch.tensor([int(own is not None)], device=device)
    dist.all_reduce(damaged)
    return own if own or not int(damaged) else f"{directory}: damaged, as another rank found"


def _first_valid(
    run: Path, damage: Callable[[Path], str | None], candidates_and_problem: tuple[list[Path], str | None]
) -> Path | None:
    directories, problem = candidates_and_problem
    found = [problem] if problem else []
    for directory in directories:
        reason = damage(directory)
        if reason is None:
            for line in found:
                logger.warning("%s; resuming from %s", line, directory)
            return directory
        found.append(reason)
    if directories:
        raise FailedError("\n".join([*found, f"{run}: no checkpoint is valid; --fresh starts a new run in its place"]))
    return None


def _damage(directory: Path, check: Callable[[Path, checkpoint_index.Index], None]) -> str | None:
    try:
        named, index = step_in_name(directory.name), checkpoint_index.read(directory)
        if named != index.step:
            return f"{directory}: damaged: its {checkpoint_index.INDEX} names step {index.step}, expected {named}"
        check(directory, index)
    except (UserError, OSError) as error:
        return str(error)
    return None
