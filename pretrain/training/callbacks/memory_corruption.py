"""Detects memory corruption: weights and optimizer moments that change by themselves.

- Between two updates, forward and backward passes only read weights and moments. So checksums from after one update
  must still hold before the next. A bit that flips in between would spoil all later steps, and replaying steps would
  not detect the flip.
- Before each save, every rank must compute with the optimizer's weights, and a load must restore the saved weights:
  their fingerprints are compared.

The fingerprint of a tensor is two sums modulo 2**64 over its elements, read as integers: the sum of the elements, and
the sum of elements times positions. A single flipped bit always changes the first sum; several flips cancel out only by
chance. The sums of a tensor's shards add up to the sums of the tensor, so a fingerprint doesn't depend on the sharding.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import first_few
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.directory import set_aside_after
from pretrain.engine.engine import Engine
from pretrain.engine.ranks import most, of_all_ranks, on_rank_0
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import heartbeat, watchdog
from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer

_PART = 2**20  # elements at once, since each takes 8 bytes or more as integers
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
_MOST_NAMED = 3
_SHARE = 0.001  # of training time that checksums may take
_BALANCE = {"cpu": 5, "cuda": 120}  # FLOPs in the time of reading a byte; a CPU core: 50 GFLOP/s and 12 GB/s
_WIDEST_FIRST = (torch.int64, torch.int32, torch.int16, torch.uint8)


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

    def end_run(self, trainer: Trainer, more: str, clean: int | None = None) -> NoReturn:
        """Tells the supervisor which rank is faulty, if that is known, and raises FailedError, whose message ends with
        `more`. All ranks call this together.

        `clean`: checkpoints after this step are set aside, since they may be wrong. None: all checkpoints are right.
        """
        if self.rank is not None:
            heartbeat.tell(trainer.run.rank, "faulty", str(self.rank))
        if clean is None:
            trainer.finish_saving()
        trainer.drop_unsaved()  # a checkpoint that is being written takes no other's place: it may be wrong
        run = trainer.run.directory
        aside = "" if clean is None else on_rank_0(lambda: set_aside_after(run, clean), str)
        raise FailedError(f"step {trainer.step}: {self.what}; {more}{aside}")


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
            found.end_run(trainer, "its memory or its processor may be faulty")


def interval(read: int, flops: float, device: str) -> int:
    """Steps between checks: as few as take at most 0.1 % of the time of training, by arithmetic.

    `read`: bytes that a checksum of the rank's memory reads. `flops`: FLOPs of the rank in a step.
    """
    return max(1, math.ceil(2 * read * _BALANCE[device] / (_SHARE * flops)))


class ComparingMemory(Callback):
    """`faults.checksum_every_steps`: takes checksums of this rank's weights and moments after an update, and verifies
    them before the next. Weights or moments on NVMe are not checked."""

    _changed: str | None = None  # the tensors that the last comparison found changed; None: not compared
    _taken: list[tuple[list[str], Tensor]] | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._engine = trainer.engine
        self._every = trainer.config.faults.checksum_every_steps
        trainer.engine.before_update = self._compare

    def before_steps(self, trainer: Trainer) -> None:
        self._taken = self._changed = None  # weights were loaded

    def after_step(self, trainer: Trainer) -> None:
        if self._changed is not None:
            self._judge(trainer, of_all_ranks(self._changed, str))
        if self._every == "auto":  # computed once the optimizer has its moments
            self._every = self._interval(trainer)
        if self._every and (trainer.step + 1) % self._every == 0:
            self._taken = self._sums()

    def _interval(self, trainer: Trainer) -> int:
        layout = trainer.layout
        rows = layout.micro_batch * layout.accumulation
        flops = rows * count_flops(trainer.outline, Sizes.of_example(*trainer.run.lengths))
        read = sum(values.numel() * values.element_size() for values in self._tensors().values())
        return interval(most(read), flops, trainer.engine.device.type)

    def _compare(self) -> None:
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
            found.end_run(trainer, "if a callback does that, set faults.checksum_every_steps", clean=trainer.step - 2)

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
