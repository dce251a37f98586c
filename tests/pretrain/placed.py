"""A model on a device, for tests that make their tensors, and compare them, on the CPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

ModelType = TypeVar("ModelType", bound=nn.Module)
_CALLED = ("forward", "encode", "decode", "masked_lm_logits")  # what tests call; other methods stay on the device


def placed(model: ModelType, device: str) -> ModelType:
    """Moves `model` to `device`. Its methods take tensors on the CPU and return such; nothing is moved inside them."""
    if device == "cpu":
        return model
    model = model.to(device)
    depth = 0

    def moving(method: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            if depth:
                return method(*arguments, **options)
            arguments, options = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (arguments, options))
            depth += 1
            try:
                results = method(*arguments, **options)
            finally:
                depth -= 1
            return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), results)

        return moved

    for name in _CALLED:
        if hasattr(model, name):
            setattr(model, name, moving(getattr(model, name)))
    return model
