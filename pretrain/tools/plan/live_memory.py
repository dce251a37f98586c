"""The bytes of all tensors that exist while code runs, and their peak.

Works on any device, also on the meta device, where tensors have shapes but no memory: the peak of a step of a model
of any size is found in a second, without a GPU.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Counts the storages that are created on `device` within its block until they are freed.

    `allocated` are the bytes that exist now, `peak` the most that existed at once. `kinds` gives the kind of a new
    tensor, from its shape, and `at_peak` the bytes of each kind at the peak. What kernels allocate inside, and what an
    allocator wastes, doesn't count.
    """

    def __init__(self, device: str, kinds: Callable[[Sequence[int]], str] = lambda shape: "tensors"):
        super().__init__()
        self._device = device
        self._kinds = kinds
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._by_kind: dict[str, int] = {}
        self.allocated = self.peak = 0
        self.at_peak: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self._device:
                self._count(value)
        return result

    def without(self, tensors: Sequence[Tensor]) -> Self:
        """Leaves out `tensors`, which existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (weakref.ref(storage, self._forget(storage._cdata)), "", 0)
        return self

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        kind = self._kinds(tensor.shape)
        self._storages[key] = (weakref.ref(storage, self._forget(key)), kind, size)
        self._add(kind, size)
        if self.allocated > self.peak:
            self.peak, self.at_peak = self.allocated, dict(self._by_kind)

    def _add(self, kind: str, size: int) -> None:
        self.allocated += size
        self._by_kind[kind] = self._by_kind.get(kind, 0) + size

    def _forget(self, key: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            _, kind, size = self._storages.pop(key)
            self._add(kind, -size)

        return freed
