"""How fast attention with a learned bias is on a GPU: this project's kernel, PyTorch's with the bias as a matrix, and
FlexAttention, whose gradient of the bias is summed by atomic additions; and PyTorch's without any bias.

    python benchmarks/attention_with_bias.py            # milliseconds of forward and backward, as JSON lines
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.models.attention import flash, fused
from pretrain.models.logit_bias import Pattern, toeplitz

HEADS, D_KV = 12, 64  # T5-base
SHAPES = [(128, 512), (16, 2048), (4, 4096)]  # rows, length

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flexible(queries: Tensor, keys: Tensor, values: Tensor, diagonals: Tensor) -> Tensor:
    """softmax(queries · keysᵀ + bias) · values by FlexAttention; the bias is read by its diagonals, as in `Pattern`."""
    from torch.nn.attention.flex_attention import flex_attention

    last = queries.size(2) - 1

    def biased(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + diagonals[head, last - query + key]

    return flex_attention(queries, keys, values, score_mod=biased, scale=1.0)


def forms() -> dict[str, Form]:
    return {
        "kernel": lambda q, k, v, bias: flash(q, k, v, Pattern(bias, None, False), 1.0, 0.0),
        "matrix": lambda q, k, v, bias: fused(q, k, v, toeplitz(bias, k.size(2)), False, 1.0, 0.0),
        "flexible": torch.compile(flexible),
        "no bias": lambda q, k, v, bias: fused(q, k, v, None, False, 1.0, 0.0),
    }


def milliseconds(form: Form, rows: int, length: int) -> tuple[float, float]:
    """The time of forward and backward, and the most memory that they take at once, in GB."""
    from triton.testing import do_bench

    shape = rows, length, HEADS, D_KV
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    bias = torch.randn(HEADS, 2 * length - 1, device="cuda", dtype=torch.bfloat16)
    inputs = [one.requires_grad_() for one in (q, k, v, bias)]
    along = torch.randn_like(q)

    def once() -> None:
        torch.autograd.grad(form(*inputs), inputs, along, allow_unused=True)

    once()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    memory = torch.cuda.max_memory_allocated() - before
    return do_bench(once, return_mode="median"), memory / 1e9


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return
    for rows, length in SHAPES:
        for name, form in forms().items():
            try:
                time, memory = milliseconds(form, rows, length)
            except torch.OutOfMemoryError:
                time = memory = float("nan")
            print(json.dumps({"rows": rows, "length": length, "form": name, "ms": time, "gb": memory}), flush=True)


if __name__ == "__main__":
    main()
