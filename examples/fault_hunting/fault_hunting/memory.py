"""Finds memory corruption: weights and optimizer moments that change by themselves.

- `MemoryChecksums`: between two updates, forward and backward passes only read weights and moments. So checksums from
  after one update must still hold before the next. A bit that flips in between would spoil all later steps, and
  replaying steps would not find the flip.
- `WeightComparison`: before each save, every rank must compute with the optimizer's weights. Their fingerprints are
  compared.
"""

import math
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fault_hunting.findings import Finding, checked_interval, named
from pretrain.engine.checkpoint.engine_state import fingerprint, fingerprints_of_masters
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import all_gather, max_over_ranks
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import watchdog
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_SHARE = 0.001  # of training time that checksums may take
_BALANCE = {"cpu": 5, "cuda": 120}  # FLOPs in the time of reading a byte; a CPU core: 50 GFLOP/s and 12 GB/s
_WIDEST_FIRST = (torch.int64, torch.int32, torch.int16, torch.uint8)


def difference(engine: Engine) -> Finding | None:
    """The rank that computes with other weights than the other ranks. None if there is none, or if weights are on NVMe.
    All ranks call this."""
    weights, names = engine.local_weights(), _names(engine)
    if weights is None:
        return None
    own = torch.zeros(len(names), 2, dtype=torch.int64, device=engine.device)
    sharded, dtype = False, torch.float32
    for number, (values, start, whole) in enumerate(weights):
        own[number] = fingerprint(values, start)
        sharded, dtype = sharded or not whole, values.dtype
    expected = fingerprints_of_masters(engine, dtype)
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


class WeightComparison(Callback):
    """Compares the weights of all ranks before each save to disk."""

    def before_save(self, trainer: Trainer) -> None:
        with watchdog.slow_phase():
            self.compare(trainer)

    def compare(self, trainer: Trainer) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: the last steps are wrong.

        The next attempt resumes from the last checkpoint on disk, when the weights were still right.
        """
        if found := difference(trainer.engine):
            found.end_run(trainer, "its memory or its processor may be faulty")


def interval(read: int, flops: float, device: str) -> int:
    """Steps between checks: as few as take at most 0.1 % of the time of training, by arithmetic.

    `read`: bytes that a checksum of the rank's memory reads. `flops`: FLOPs of the rank in a step.
    """
    return max(1, math.ceil(2 * read * _BALANCE[device] / (_SHARE * flops)))


class MemoryChecksums(Callback):
    """Takes checksums of this rank's weights and moments after an update, and verifies them before the next, every
    `every_steps` steps. "auto": as often as takes at most 0.1 % of the time. Weights or moments on NVMe aren't checked.

    A callback that changes weights between updates counts as a fault.
    """

    _changed: str | None = None  # the tensors that the last comparison found changed; None: not compared
    _taken: list[tuple[list[str], Tensor]] | None = None

    def __init__(self, every_steps: int | Literal["auto"] = "auto"):
        self._every = checked_interval(every_steps)

    def before_training(self, trainer: Trainer) -> None:
        self._engine = trainer.engine

    def before_steps(self, trainer: Trainer) -> None:
        self._taken = self._changed = None  # weights were loaded

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._changed is not None:
            self._judge(trainer, all_gather(self._changed, str))
        if self._every == "auto":  # computed once the optimizer has its moments
            self._every = self._interval(trainer)
        if (result.step + 1) % self._every == 0:
            self._taken = self._sums()

    def _interval(self, trainer: Trainer) -> int:
        layout = trainer.layout
        rows = layout.micro_batch * layout.accumulation
        flops = rows * count_flops(trainer.meta_model, Sizes.of_example(*trainer.run.lengths))
        read = sum(values.numel() * values.element_size() for values in self._tensors().values())
        return interval(max_over_ranks(read), flops, trainer.engine.device.type)

    def before_update(self, trainer: Trainer) -> None:
        """Compares the memory with the checksums that were taken after the last update, if any."""
        if self._taken is None:
            return
        pairs = zip(self._taken, self._sums(), strict=True)
        changed = (named(names, before != now) for (names, before), (_, now) in pairs)
        self._changed, self._taken = next(filter(None, changed), ""), None

    def _judge(self, trainer: Trainer, changed: list[str]) -> None:
        """Raises FailedError if memory of a rank has `changed`: this step is wrong, and a checkpoint of the step before
        may be wrong, too.

        The next attempt resumes from the newest checkpoint on disk before these steps.
        """
        self._changed = None
        rank = next((rank for rank, names in enumerate(changed) if names), None)
        if rank is not None:
            found = Finding(f"memory of rank {rank} changed between two updates: {changed[rank]}", rank)
            found.end_run(trainer, "if a callback does that, leave MemoryChecksums out", clean=trainer.step - 2)

    def _sums(self) -> list[tuple[list[str], Tensor]]:
        """The names of this rank's tensors and their checksums (tensors,), for each device that has some."""
        tensors = self._tensors()
        found = []
        for device in dict.fromkeys(values.device for values in tensors.values()):
            here = {name: values for name, values in tensors.items() if values.device == device}
            found.append((list(here), torch.stack([checksum(values) for values in here.values()])))
        return found

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that this rank keeps from one update to the next, by name; each storage once."""
        weights, buffers = self._engine.local_weights(), self._engine.flat_buffers()
        if weights is None or buffers is None:
            return {}
        found = {name: values for name, (values, _, _) in zip(_names(self._engine), weights, strict=True)}
        places = {values.untyped_storage().data_ptr() for values in found.values()}
        for number, buffer in enumerate(buffers):
            if buffer.tensor.untyped_storage().data_ptr() not in places:
                found[f"the optimizer's weights, group {number}"] = buffer.tensor
        for number, state in enumerate(self._engine.optimizer.state.values()):
            for key, values in state.items():
                if isinstance(values, Tensor):
                    found[f"{key} of group {number}"] = values
        return {name: values.detach() for name, values in found.items() if values.numel()}


def checksum(values: Tensor) -> Tensor:
    """() int64: the sum of a tensor's memory, read as integers, modulo their width. One changed bit changes it."""
    flat = values.contiguous().view(-1)
    start, size = flat.storage_offset() * flat.element_size(), flat.numel() * flat.element_size()
    kind = next(kind for kind in _WIDEST_FIRST if start % kind.itemsize == 0 and size % kind.itemsize == 0)
    return flat.view(kind).sum(dtype=kind).long()
