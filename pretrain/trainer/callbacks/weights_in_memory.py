"""Whether memory holds right weights: every rank computes with those that the optimizer holds, loads those that were
saved, and keeps weights and moments from one update to the next.

A tensor's fingerprint is two sums over its elements, read as integers, modulo 2**64: of the elements, and of each times
its position. One changed bit changes the first; that several leave both as they were takes chance. The sums of parts
add up to those of the whole, so they don't depend on how weights are sharded.

Between two updates only forward and backward passes read weights and moments, so checksums taken after one must be
equal before the next. A bit that flips there would be in all later steps, without a trace in gradients that are
computed twice.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.directory import set_aside_after
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import heartbeat, watchdog
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.deepspeed_private import flat_buffers, in_memory, local_weights, swapped, wrapped
from pretrain.zero.engine import Engine
from pretrain.zero.ranks import least, of_all_ranks, on_rank_0

_PART = 2**20  # elements: as integers of 64 bits they take eight times the memory of bf16
_INTEGERS_OF_SIZE = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
_MOST_NAMED = 3
_SHARE = 0.001  # of the arithmetic of training, that checksums may take the time of
_BALANCE = {"cpu": 5, "cuda": 120}  # FLOPs of training in the time of reading a byte: 50 GFLOP/s and 12 GB/s of a core
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def sums(values: Tensor, start: int = 0) -> Tensor:
    """The fingerprint (2,) int64 of a part of a tensor, whose first element is at `start` of the flattened whole."""
    found = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, values.numel(), _PART):
        part = values[first : first + _PART].contiguous().view(_INTEGERS_OF_SIZE[values.element_size()]).long()
        position = start + first + 1
        places = torch.arange(position, position + part.numel(), device=values.device)
        found += torch.stack([part.sum(), (part * places).sum()])
    return found


def named(names: list[str], wrong: Tensor) -> str:
    """The first of the tensors `names` that are `wrong` (names,), and how many more there are."""
    chosen = [name for name, is_wrong in zip(names, wrong.tolist(), strict=True) if is_wrong]
    more = f" and {len(chosen) - _MOST_NAMED} more" if len(chosen) > _MOST_NAMED else ""
    return ", ".join(chosen[:_MOST_NAMED]) + more


@dataclass(frozen=True)
class Finding:
    """Wrong sums: what was found, and on which `rank`; None if it may be one of several."""

    what: str
    rank: int | None = None

    def tell(self, trainer: Trainer) -> None:
        """Tells the supervisor which rank is faulty, if that is known."""
        if self.rank is not None:
            heartbeat.tell(trainer.run.rank, "faulty", str(self.rank))


def of_masters(engine: Engine) -> str:
    """A fingerprint of the fp32 weights that the optimizer holds, whatever shards they are in. All ranks call it."""
    return hashlib.blake2b(_masters(engine, torch.float32).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def difference(engine: Engine) -> Finding | None:
    """Which rank computes with other weights than the rest; None if none does, or if weights are on NVMe. All ranks
    call it.

    In fp32, the rank whose optimizer holds a weight computes with that very tensor: if it alone agrees with the
    optimizer's, it is the one whose weight has changed. Of two ranks it can't be told.
    """
    weights, names = local_weights(engine.deepspeed), _names(engine)
    if weights is None:
        return None
    own = torch.zeros(len(names), 2, dtype=torch.int64, device=engine.device)
    sharded, dtype = False, torch.float32
    for number, (values, start, whole) in enumerate(weights):
        own[number] = sums(values, start)
        sharded, dtype = sharded or not whole, values.dtype
    expected = _masters(engine, dtype)
    if sharded:  # no rank has them whole, so the sums of all are compared
        dist.all_reduce(own)
    right = (own == expected).all(dim=1)
    gathered = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, right)
    return judged(names, torch.stack(gathered).cpu(), shared=dtype == torch.float32)


def judged(names: list[str], right: Tensor, shared: bool) -> Finding | None:
    """The finding, from the table (ranks, parameters) of those that agree with the optimizer's."""
    agree, ranks = right.sum(dim=0), right.size(0)
    if bool((agree == ranks).all()):
        return None
    if bool((agree == 0).any()):
        return Finding(f"the ranks compute with other weights than the optimizer's: {named(names, agree == 0)}")
    few = shared and bool((2 * agree < ranks).any())
    if shared and not few and bool((2 * agree == ranks).any()):
        return Finding(f"the ranks compute with different weights: {named(names, agree < ranks)}")
    odd = right if few else ~right
    concerned = (2 * agree < ranks) if few else (agree < ranks)
    rank = int((odd & concerned).any(dim=1).int().argmax())
    return Finding(
        f"rank {rank} computes with other weights than the others: {named(names, odd[rank] & concerned)}", rank
    )


def _names(engine: Engine) -> list[str]:
    return [name for name, _ in engine.deepspeed.module.named_parameters()]


def _masters(engine: Engine, dtype: torch.dtype) -> Tensor:
    """(parameters, 2): fingerprints of the fp32 weights, rounded to `dtype`."""
    numbers = {name: number for number, name in enumerate(_names(engine))}
    found = torch.zeros(len(numbers), 2, dtype=torch.int64, device=engine.device)
    for fragment in in_memory(engine.deepspeed):
        values = fragment.view(fragment.buffer.data).to(dtype)
        found[numbers[fragment.name]] += sums(values, fragment.start).to(found.device)
    dist.all_reduce(found)
    return found


class WeightComparison(Callback):
    """Compares the weights of all ranks before each save, and with those that were saved after each load."""

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and of_masters(trainer.engine) != saved:
            raise FailedError(f"{checkpoint}: its weights aren't those that the run had when it saved them")

    def after_step(self, trainer: Trainer) -> None:
        if trainer.saving:
            with watchdog.slow_phase():
                self.compare(trainer)
                trainer.weights = of_masters(trainer.engine)

    def compare(self, trainer: Trainer) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: steps since then are wrong.

        The next attempt goes on from the last checkpoint on disk, before which they were right.
        """
        if found := difference(trainer.engine):
            found.tell(trainer)
            trainer.finish_saving()
            trainer.drop_unsaved()
            raise FailedError(f"step {trainer.step}: {found.what}; its memory or its processor may be faulty")


def interval(read: int, flops: float, device: str) -> int:
    """As few steps from one check to the next as take at most 0.1 % of the time of training, by arithmetic.

    `read`: bytes that a checksum of the rank's memory reads. `flops`: of a step of the rank.
    """
    return max(1, math.ceil(2 * read * _BALANCE[device] / (_SHARE * flops)))


class ComparingMemory(Callback):
    """`faults.checksum_every_steps`: takes checksums of this rank's weights and moments after an update, and compares
    them before the next. Where weights or moments are on NVMe, there are none."""

    _changed: str | None = None  # what the last comparison has found; None: there was none
    _taken: list[tuple[list[str], Tensor]] | None = None

    def before_training(self, trainer: Trainer) -> None:
        self._engine = trainer.engine.deepspeed
        self._names = [name for name, _ in self._engine.module.named_parameters()]
        self._every = trainer.config.faults.checksum_every_steps
        trainer.engine.before_update = self._compare

    def before_steps(self, trainer: Trainer) -> None:
        self._taken = self._changed = None  # weights were loaded

    def after_step(self, trainer: Trainer) -> None:
        if self._changed is not None:
            self._judge(trainer, of_all_ranks(self._changed))
        if self._every == "auto":  # known when the optimizer has its moments
            self._every = self._interval(trainer)
        if self._every and (trainer.step + 1) % self._every == 0:
            self._taken = self._sums()

    def _interval(self, trainer: Trainer) -> int:
        layout, device = trainer.layout, trainer.engine.device
        rows = layout.micro_batch * layout.accumulation
        flops = rows * count_flops(trainer.outline, Sizes.of_example(*trainer.run.lengths))
        read = sum(values.numel() * values.element_size() for values in self._tensors().values())
        return interval(-least(-read, device), flops, device.type)

    def _compare(self) -> None:
        """Compares with what was taken since the last update, if it was."""
        if self._taken is None:
            return
        pairs = zip(self._taken, self._sums(), strict=True)
        changed = (named(names, before != now) for (names, before), (_, now) in pairs)
        self._changed, self._taken = next(filter(None, changed), ""), None

    def _judge(self, trainer: Trainer, changed: list[str]) -> None:
        """Raises FailedError if memory of a rank has `changed`: this step is wrong, and so may be a checkpoint of the
        step before.

        The next attempt goes on from the newest checkpoint on disk before them.
        """
        self._changed = None
        rank = next((rank for rank, names in enumerate(changed) if names), None)
        if rank is None:
            return
        heartbeat.tell(trainer.run.rank, "faulty", str(rank))
        trainer.finish_saving()
        trainer.drop_unsaved()
        run, clean = trainer.run.directory, trainer.step - 2
        on_rank_0(lambda: set_aside_after(run, clean))
        raise FailedError(
            f"step {trainer.step}: memory of rank {rank} changed between two updates: {changed[rank]}; if a callback "
            "does that, set faults.checksum_every_steps"
        )

    def _sums(self) -> list[tuple[list[str], Tensor]]:
        """The names of this rank's tensors and their checksums (tensors,), for each device that has some."""
        tensors = self._tensors()
        found = []
        for device in dict.fromkeys(values.device for values in tensors.values()):
            here = {name: values for name, values in tensors.items() if values.device == device}
            found.append((list(here), torch.stack([checksum(values) for values in here.values()])))
        return found

    def _tensors(self) -> dict[str, Tensor]:
        """What lies in this rank's memory from one update to the next, by name; each place once."""
        engine = self._engine
        weights = local_weights(engine)
        buffers = list(flat_buffers(engine))
        if weights is None or any(swapped(engine, number) for number in range(len(buffers))):
            return {}
        found = {name: values for name, (values, _, _) in zip(self._names, weights, strict=True)}
        places = {values.untyped_storage().data_ptr() for values in found.values()}
        for number, buffer in enumerate(buffers):
            if buffer.tensor.untyped_storage().data_ptr() not in places:
                found[f"the optimizer's weights, group {number}"] = buffer.tensor
        for number, state in enumerate(wrapped(engine).state.values()):
            for key, values in state.items():
                if isinstance(values, Tensor):
                    found[f"{key} of group {number}"] = values
        return {name: values.detach() for name, values in found.items() if values.numel()}


def checksum(values: Tensor) -> Tensor:
    """() int64: the sum of a tensor's memory, read as integers, modulo their width. One changed bit changes it."""
    flat = values.contiguous().view(-1)
    start, size = flat.storage_offset() * flat.element_size(), flat.numel() * flat.element_size()
    kind = next(kind for kind in _INTEGERS if start % kind.itemsize == 0 and size % kind.itemsize == 0)
    return flat.view(kind).sum(dtype=kind).long()
