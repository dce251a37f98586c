"""The precision and the bounds of numbers, and their copies between the host and a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> torch.dtype:
    """fp32, or the dtype of `x` where that has more bits."""
    return torch.promote_types(x.dtype, torch.float32)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(logits / cap) (Gemma 2, section 2): nearly the identity for small logits, and never beyond ±cap.

    Without a cap, the logits as they are.
    """
    return logits if cap is None else cap * torch.tanh(logits / cap)


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values)` on `device`, through page-locked memory: the host doesn't wait for the copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class OnHost:
    """The values that `tensor` has now, for later. The host doesn't wait for their copy until it asks for them."""

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
