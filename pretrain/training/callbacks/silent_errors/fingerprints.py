"""Compares fingerprints of weights: every rank must compute with the optimizer's weights, and a load must restore the
saved weights.

The fingerprint of a tensor is two sums modulo 2**64 over its elements, read as integers: the sum of the elements, and
the sum of elements times positions. A single flipped bit always changes the first sum; several flips cancel out only by
chance. The sums of shards add up to those of the tensor, so a fingerprint doesn't depend on the sharding.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import first_few
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.engine import Engine
from pretrain.run import heartbeat, watchdog
from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer

_PART = 2**20  # elements at once, since each takes 8 bytes or more as integers
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
_MOST_NAMED = 3


def sums(values: Tensor, start: int = 0) -> Tensor:
    """The fingerprint (2,) int64 of a part of a tensor. `start`: position of the part in the flattened tensor."""
    found = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, values.numel(), _PART):
        part = values[first : first + _PART].contiguous().view(_INTEGERS[values.element_size()]).long()
        position = start + first + 1
        places = torch.arange(position, position + part.numel(), device=values.device)
        found += torch.stack([part.sum(), (part * places).sum()])
    return found


def named(names: list[str], wrong: Tensor) -> str:
    """The names of the first tensors that are `wrong` (names,)."""
    return first_few((name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong), _MOST_NAMED)


@dataclass(frozen=True)
class Finding:
    """A difference that was found.

    Attributes:
        what: the difference, in words.
        rank: the rank that it is on; None if it may be one of several.
    """

    what: str
    rank: int | None = None

    def tell(self, trainer: Trainer) -> None:
        """Tells the supervisor which rank is faulty, if that is known."""
        if self.rank is not None:
            heartbeat.tell(trainer.run.rank, "faulty", str(self.rank))


def of_masters(engine: Engine) -> str:
    """A fingerprint of the optimizer's fp32 weights, independent of their shards. All ranks call this."""
    return hashlib.blake2b(_masters(engine, torch.float32).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def difference(engine: Engine) -> Finding | None:
    """The rank that computes with other weights than the other ranks. None if there is none, or if weights are on NVMe.
    All ranks call this."""
    weights, names = engine.local_weights(), _names(engine)
    if weights is None:
        return None
    own = torch.zeros(len(names), 2, dtype=torch.int64, device=engine.device)
    sharded, dtype = False, torch.float32
    for number, (values, start, whole) in enumerate(weights):
        own[number] = sums(values, start)
        sharded, dtype = sharded or not whole, values.dtype
    expected = _masters(engine, dtype)
    if sharded:  # no rank has whole weights, so the sums over all ranks are compared
        dist.all_reduce(own)
    right = (own == expected).all(dim=1)
    gathered = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, right)
    return judged(names, torch.stack(gathered).cpu())


def judged(names: list[str], right: Tensor) -> Finding | None:
    """The finding, from a table (ranks, parameters): `right` if the rank's weights are the optimizer's."""
    agree, ranks = right.sum(dim=0), right.size(0)
    if bool((agree == ranks).all()):
        return None
    if bool((agree == 0).any()):
        return Finding(f"the ranks have other weights than the optimizer's: {named(names, agree == 0)}")
    rank = int((~right).any(dim=1).int().argmax())
    return Finding(f"rank {rank} has other weights than the other ranks: {named(names, ~right[rank])}", rank)


def _names(engine: Engine) -> list[str]:
    return [name for name, _ in engine.module.named_parameters()]


def _masters(engine: Engine, dtype: torch.dtype) -> Tensor:
    """(parameters, 2): fingerprints of the fp32 weights, rounded to `dtype`."""
    numbers = {name: number for number, name in enumerate(_names(engine))}
    found = torch.zeros(len(numbers), 2, dtype=torch.int64, device=engine.device)
    for fragment in engine.fragments():
        values = fragment.view(fragment.buffer.data).to(dtype)
        found[numbers[fragment.name]] += sums(values, fragment.start).to(found.device)
    dist.all_reduce(found)
    return found


class WeightComparison(Callback):
    """Compares the weights of all ranks before each save. After each load, compares the weights with the saved ones."""

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and of_masters(trainer.engine) != saved:
            raise FailedError(f"{checkpoint}: its weights differ from those that the run saved")

    def before_save(self, trainer: Trainer) -> None:
        with watchdog.slow_phase():
            self.compare(trainer)
            trainer.weights = of_masters(trainer.engine)

    def compare(self, trainer: Trainer) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: the last steps are wrong.

        The next attempt resumes from the last checkpoint on disk, when the weights were still right.
        """
        if found := difference(trainer.engine):
            found.tell(trainer)
            trainer.finish_saving()
            trainer.drop_unsaved()
            raise FailedError(f"step {trainer.step}: {found.what}; its memory or its processor may be faulty")
