"""Copies between the host and a device for which the host doesn't wait. They go through page-locked memory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on `device`."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class OnHost:
    """The values that `tensor` has now, for later."""

    def __init__(self, tensor: Tensor):
        self._copy = tensor.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> list:
        """Waits for the copy, if the device hasn't got that far."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()
