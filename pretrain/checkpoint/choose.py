"""Finds the latest valid checkpoint of a run. Imports no PyTorch, since the launcher looks for it too."""

import logging
from collections.abc import Callable
from pathlib import Path

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.directory import candidates, step_in_name

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
    return first_valid(run, lambda one: damage(one, checkpoint_index.missing_or_short), candidates(run))


def is_valid(directory: Path) -> bool:
    """True if every file of a checkpoint has the content that was written."""
    return damage(directory, checkpoint_index.verify) is None


def first_valid(
    run: Path, damage: Callable[[Path], str | None], candidates_and_problem: tuple[list[Path], str | None]
) -> Path | None:
    """The first of the `candidates` of `run` without `damage`; what is wrong with those before it is logged.

    None if there are none. Raises FailedError if all of them are damaged.
    """
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


def damage(directory: Path, check: Callable[[Path, checkpoint_index.Index], None]) -> str | None:
    """What is wrong with a checkpoint: its index, or what `check` finds."""
    try:
        named, index = step_in_name(directory.name), checkpoint_index.read(directory)
        if named != index.step:
            return f"{directory}: damaged: its {checkpoint_index.INDEX} names step {index.step}, expected {named}"
        check(directory, index)
    except (UserError, OSError) as error:
        return str(error)
    return None
