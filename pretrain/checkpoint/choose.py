"""Which checkpoint a run goes on from: the latest that is sound."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import FailedError, UserError
from pretrain.checkpoint import index as checkpoint_index

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def newest(run: Path) -> Path | None:
    """The latest checkpoint whose files are all there and as long as they should be; None before the first one.

    Raises FailedError where there are checkpoints, and none of them is sound.
    """

    def damage(directory: Path) -> str | None:
        return _damage(directory, lambda index: checkpoint_index.missing_or_short(directory, index))

    return _first_sound(run, damage)


def newest_verified(run: Path, rank: int, ranks: int, device: "torch.device") -> Path | None:
    """The latest checkpoint whose checksums are right; each rank reads its share of the files, all call it together."""
    import torch  # the launcher looks for checkpoints too, and starts fast
    import torch.distributed as dist

    def damage(directory: Path) -> str | None:
        mine = slice(rank, None, ranks)
        own = _damage(directory, lambda index: checkpoint_index.verify(directory, index, mine))
        damaged = torch.tensor([int(own is not None)], device=device)
        dist.all_reduce(damaged)
        return own if own or not int(damaged) else f"{directory}: damaged, as another rank found"

    return _first_sound(run, damage)


def _first_sound(run: Path, damage: Callable[[Path], str | None]) -> Path | None:
    found: list[str] = []
    for directory in checkpoint_index.candidates(run):
        reason = damage(directory)
        if reason is None:
            for line in found:
                logger.warning("%s; going on from %s", line, directory)
            return directory
        found.append(reason)
    if found:
        raise FailedError("\n".join([*found, f"{run}: no checkpoint is sound; nothing was changed"]))
    return None


def _damage(directory: Path, check: Callable[[checkpoint_index.Index], None]) -> str | None:
    try:
        check(checkpoint_index.read(directory))
    except (UserError, OSError) as error:
        return str(error)
    return None
