"""Detects memory corruption: weights and optimizer moments must not change between two updates.

Between two updates, forward and backward passes only read weights and moments. So checksums from after one update must
still hold before the next. A bit that flips in between would spoil all later steps, and replaying steps would not
detect the flip.
"""

import math

import torch
from torch import Tensor

from data_pipeline.base.errors import FailedError
from pretrain.engine.checkpoint.directory import set_aside_after
from pretrain.engine.ranks import most, of_all_ranks, on_rank_0
from pretrain.models.flops import Sizes, count_flops
from pretrain.run import heartbeat
from pretrain.training.callback import Callback
from pretrain.training.callbacks.silent_errors.fingerprints import named
from pretrain.training.trainer import Trainer

_SHARE = 0.001  # of training time that checksums may take
_BALANCE = {"cpu": 5, "cuda": 120}  # FLOPs in the time of reading a byte; a CPU core: 50 GFLOP/s and 12 GB/s
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
        self._names = [name for name, _ in trainer.engine.module.named_parameters()]
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
        if rank is None:
            return
        heartbeat.tell(trainer.run.rank, "faulty", str(rank))
        trainer.finish_saving()
        trainer.drop_unsaved()
        run, clean = trainer.run.directory, trainer.step - 2
        aside = on_rank_0(lambda: set_aside_after(run, clean), str)
        raise FailedError(
            f"step {trainer.step}: memory of rank {rank} changed between two updates: {changed[rank]}; if a callback "
            f"does that, set faults.checksum_every_steps{aside}"
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
        """The tensors that this rank keeps from one update to the next, by name; each storage once."""
        weights, buffers = self._engine.local_weights(), self._engine.flat_buffers()
        if weights is None or buffers is None:
            return {}
        found = {name: values for name, (values, _, _) in zip(self._names, weights, strict=True)}
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
    kind = next(kind for kind in _INTEGERS if start % kind.itemsize == 0 and size % kind.itemsize == 0)
    return flat.view(kind).sum(dtype=kind).long()
