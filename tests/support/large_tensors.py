"""Which operations make large tensors."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargeTensors(TorchDispatchMode):
    """Records the storages of at least `size` bytes that operations make."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.made = size, dict[int, torch.Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in [*args, *(kwargs or {}).values()] if torch.is_tensor(x)}
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if torch.is_tensor(result):
                storage = result.untyped_storage()
                if storage.nbytes() >= self.size and storage.data_ptr() not in given:
                    self.made[storage.data_ptr()] = result  # kept, so that no address is used twice
        return results
