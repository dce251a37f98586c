"""Finds the checkpoint that a run resumes from. All ranks call these functions together."""

from pathlib import Path

from pretrain.engine.checkpoint.directory import candidates
from pretrain.engine.checkpoint.index import damage, first_valid
from pretrain.engine.checkpoint.tensors import StoredTensors, verify_share
from pretrain.engine.ranks import first_value, on_rank_0


def newest_verified(run: Path) -> Path | None:
    """The latest checkpoint of `run` whose content is verified; None if there are no checkpoints. Raises FailedError
    if all are damaged."""
    # on rank 0, since a network file system may show older checkpoints to other hosts
    found = on_rank_0(lambda: candidates(run), tuple[list[Path], str | None])
    return first_valid(run, _damage_on_any_rank, *found)


def _damage_on_any_rank(directory: Path) -> str | None:
    """The damage of a checkpoint, by the first rank that has found any. Each rank verifies its share of the files."""
    return first_value(damage(directory, lambda one, _: verify_share(StoredTensors(one))))
