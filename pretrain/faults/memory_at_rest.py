"""Whether memory keeps what the optimizer has written: weights and moments, from one update to the next.

Between two updates only forward and backward passes read them, so checksums taken after one must be equal before the
next. A bit that flips there would be in all later steps, without a trace in gradients that are computed twice.
"""

import math

import torch
from torch import Tensor

from pretrain.faults.fingerprints import Finding, named
from pretrain.zero.deepspeed_private import flat_buffers, local_weights, swapped, wrapped
from pretrain.zero.engine import Engine
from pretrain.zero.ranks import of_all_ranks

_SHARE = 0.001  # of the arithmetic of training, that checksums may take the time of
_BALANCE = {"cpu": 5, "cuda": 120}  # FLOPs of training in the time of reading a byte: 50 GFLOP/s and 12 GB/s of a core
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def interval(read: int, flops: float, device: str) -> int:
    """As few steps from one check to the next as take at most 0.1 % of the time of training, by arithmetic.

    `read`: bytes that a checksum of the rank's memory reads. `flops`: of a step of the rank.
    """
    return max(1, math.ceil(2 * read * _BALANCE[device] / (_SHARE * flops)))


class MemoryAtRest:
    """Checksums of this rank's weights and moments: `take` is called after an update, `compare` before the next.

    Where weights or moments are on NVMe, there are none.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._names = [name for name, _ in engine.deepspeed.module.named_parameters()]
        self._taken: list[tuple[list[str], Tensor]] | None = None
        self._changed: str | None = None  # what `compare` has found; None: it wasn't called

    def bytes(self) -> int:
        """How many bytes a checksum reads."""
        return sum(values.numel() * values.element_size() for values in self._tensors().values())

    def forget(self) -> None:
        """Notes that weights are about to be loaded or changed."""
        self._taken = self._changed = None

    def take(self) -> None:
        """Takes the checksums, with which the next `compare` compares."""
        self._taken = self._sums()

    def compare(self) -> None:
        """Compares with what `take` has taken, if it was called since."""
        if self._taken is None:
            return
        pairs = zip(self._taken, self._sums(), strict=True)
        changed = (named(names, before != now) for (names, before), (_, now) in pairs)
        self._changed, self._taken = next(filter(None, changed), ""), None

    def finding(self) -> Finding | None:
        """What the last `compare` of any rank has found. All ranks call this together."""
        if self._changed is None:
            return None
        found, self._changed = of_all_ranks(self._changed), None
        wrong = ((rank, names) for rank, names in enumerate(found) if names)
        return next(
            (Finding(f"memory of rank {rank} changed between two updates: {names}", rank) for rank, names in wrong),
            None,
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
        engine = self._engine.deepspeed
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
