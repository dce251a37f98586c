"""The loss of states in chunks against the loss of all their logits, in fp64: on any device."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.functional import cross_entropy
from pretrain.functional.cross_entropy import CrossEntropy, token_losses
from pretrain.functional.numerics import soft_capped


def errors(
    device: str, dtype: torch.dtype, z_loss: float, smoothing: float, compiled: bool, softcap: float | None = None
) -> list[float]:
    """Relative errors of the losses and of the gradients of states, matrix and bias; 9 targets in chunks of 4."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    x, weight, bias = draw(3, 5, 24), draw(5000, 24), draw(5000)
    labels = torch.randint(0, 5000, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, :3] = IGNORE_INDEX
    labels = labels.to(device)
    along = torch.rand(3, 5, generator=generator, dtype=torch.float64).to(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 4 * 5000)
        settings = CrossEntropy(z_loss, smoothing, softcap, compiled)
        found = cross_entropy.chunked_cross_entropy(x, weight, bias, labels, settings)
        gradients = torch.autograd.grad((found * along).sum(), (x, weight, bias))
    exact = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    logits = torch.nn.functional.linear(*exact)
    defined = token_losses(logits if softcap is None else soft_capped(logits, softcap), labels, z_loss, smoothing)
    expected = torch.autograd.grad((defined * along).sum(), exact)
    assert not found[labels == IGNORE_INDEX].any()
    pairs = zip([found, *gradients], [defined, *expected], strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


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


def largest_tensor(device: str) -> int:
    """Numbers in the largest tensor that forward and backward make for 64 targets, in chunks of 8, of 1,000 tokens."""
    x = torch.randn(64, 4, device=device, requires_grad=True)
    weight = torch.randn(1000, 4, device=device, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch, LargeTensors(1) as watched:
        patch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 8 * 1000)
        labels = torch.arange(64, device=device)
        cross_entropy.chunked_cross_entropy(x, weight, None, labels, CrossEntropy()).sum().backward()
    return max(one.numel() for one in watched.made.values())
