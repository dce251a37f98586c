"""Attention over a grid of lengths and masks, forward and backward, against an eager softmax in fp64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.functional.attention import attend
from pretrain.functional.attention_bias import MASKED, masked, visible

LENGTHS = (63, 64, 114, 128, 192, 320, 512)
MASKS = ("none", "causal", "bias", "padding", "bias and padding", "packed", "masked whole")
BATCH, HEADS, WIDTH = 2, 2, 16


def errors(
    device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS
) -> Iterator[tuple[tuple[int, str], float]]:
    """For each length and mask, the largest relative L2 error of the output and of all gradients; inf if one isn't
    finite. The inputs are `dtype` numbers in both computations."""
    for length in lengths:
        for mask in MASKS:
            yield (length, mask), _error(length, mask, device, dtype)


def _error(length: int, kind: str, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(length)
    shape = (BATCH, HEADS, length, WIDTH)
    queries, keys, values, upstream = (torch.randn(shape, generator=generator) for _ in range(4))
    bias = torch.randn(1, HEADS, length, length, generator=generator) if "bias" in kind else None
    given = [tensor.to(device, dtype) for tensor in (queries, keys, values) if tensor is not None]
    given += [bias.to(device, dtype)] if bias is not None else []
    mask = _visible(kind, length, device)
    scale = WIDTH**-0.5
    inputs = [tensor.clone().requires_grad_() for tensor in given]
    additive = masked(inputs[3] if bias is not None else None, mask, dtype)
    found = attend(*inputs[:3], additive, kind == "causal", scale, 0.0)
    found_gradients = torch.autograd.grad(found, inputs, upstream.to(device, dtype))

    exact = [tensor.double().requires_grad_() for tensor in given]
    logits = exact[0] * scale @ exact[1].transpose(-1, -2)
    if kind == "causal":
        mask = visible(length, length, device, causal=True)
    added = exact[3] if bias is not None else torch.zeros(1, dtype=torch.float64, device=device)
    added = added if mask is None else added.expand(logits.shape).masked_fill(~mask, MASKED)
    expected = torch.softmax(logits + added, dim=-1) @ exact[2]
    gradients = torch.autograd.grad(expected, exact, upstream.to(device, dtype).double())
    pairs = [(found, expected), *zip(found_gradients, gradients, strict=True)]
    return max(_relative(one, other) for one, other in pairs)


def _visible(kind: str, length: int, device: torch.device) -> Tensor | None:
    """Which keys a query sees; None for all, and for causality, which `attend` knows by itself."""
    real = torch.ones(BATCH, length, dtype=torch.long, device=device)
    if "padding" in kind:
        real[0, length // 2 :] = 0
        return visible(length, length, device, key_mask=real)
    if kind == "packed":  # the second row ends with padding, whose queries see no example's keys but padding's
        real[:, length // 3 :] = 2
        real[1, -length // 4 :] = 0
        return visible(length, length, device, query_segments=real, key_segments=real)
    if kind == "masked whole":
        real[1] = 0
        real[0, 5:] = 0
        return visible(length, length, device, key_mask=real)
    return None


def _relative(found: Tensor, expected: Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
