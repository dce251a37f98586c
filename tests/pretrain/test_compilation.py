"""Triton's compilations of the attention kernels: how many there are. No GPU is needed."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pretrain.functional.attention_bias import labels
from pretrain.kernels.attention import flash_attention
from pretrain.kernels.flash import backward_keys, backward_queries, forward

HEADS, D_KV = 3, 16


class Driver:
    """Of a GPU that isn't there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: object = None) -> int:
        return 0


@pytest.fixture
def compilations(monkeypatch) -> Counter[str]:
    """The number of each kernel that Triton would compile for an H100 from now on. Nothing is compiled or launched."""
    monkeypatch.setattr(driver, "_active", Driver())
    for kernel in (forward, backward_queries, backward_keys):
        kernel.device_caches.clear()
    found: dict[str, str] = {}

    def note(*, compile: Mapping[str, Any], fn: Any, **_: object) -> bool:
        found[compile["specialization_data"]] = fn.name.rsplit(".", 1)[-1]
        counts.clear()
        counts.update(found.values())
        return True

    counts: Counter[str] = Counter()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    return counts


def attend(rows: int, queries: int, keys: int, *, causal: bool = False, bias: bool = False, padded: bool = False):
    """Forward and backward, with the strides that joined products give."""

    def heads(length: int) -> torch.Tensor:
        return torch.zeros(rows, length, HEADS * D_KV, dtype=torch.bfloat16).unflatten(-1, (-1, D_KV)).transpose(1, 2)

    inputs = [heads(queries), heads(keys), heads(keys)]
    inputs += [torch.zeros(HEADS, queries + keys - 1, dtype=torch.bfloat16)] if bias else []
    inputs = [one.requires_grad_() for one in inputs]
    seen = labels(queries, torch.ones(rows, keys), None, None) if padded else None
    out = flash_attention(*inputs[:3], inputs[3] if bias else None, seen or (), causal)
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


def t5_step(rows: int, inputs: int, targets: int) -> None:
    attend(rows, inputs, inputs, bias=True, padded=True)
    attend(rows, targets, targets, bias=True, causal=True)
    attend(rows, targets, inputs, padded=True)


def test_ragged_widths_are_compiled_once(compilations):
    """Three forms of attention, of which two have a bias. Widths that are 1, odd, or multiples of 16 need no others."""
    draw = random.Random(0)
    widths = [(512, 114), (512, 128), (1, 1), *((draw.randint(200, 512), draw.randint(20, 114)) for _ in range(20))]
    for some in widths:
        t5_step(draw.randint(1, 3), *some)
    assert compilations == {"forward": 3, "backward_queries": 3, "backward_keys": 3}
