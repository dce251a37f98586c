"""Attention of T5 v1.1 base by this project's kernels: the check at a run's start, and the time of each kernel."""

import time
from collections.abc import Callable

import torch

from checks.gpu.report import Report
from checks.gpu.trace import OURS, Trace
from checks.gpu.workload import Workload
from pretrain.models.functional.attention_backends import Pattern, flash
from pretrain.training.attention_check import find_problem

PRODUCTS = dict(zip(OURS, (2, 3, 4), strict=True))  # of (queries, keys, d_kv), that each kernel makes
TIMES = 5


def attention(report: Report) -> None:
    dtype = torch.bfloat16 if report.cuda else torch.float32  # Triton's interpreter has no products in bf16
    work = Workload(report)
    with report.part("the check at a run's start"):
        started = time.perf_counter()
        problem = find_problem(work.config("eager", 2).model, work.batches(2)[:1], dtype, report.device)
        report.fact("seconds_of_check", time.perf_counter() - started)
        report.expect("the kernels compute what PyTorch's do", problem is None, problem)
    inputs, targets = work.inputs, work.targets
    for name, queries, keys, biased, causal in (
        ("encoder", inputs, inputs, True, False),
        ("decoder", targets, targets, True, True),
        ("cross", targets, inputs, False, False),
    ):
        with report.part(name):
            passes = _passes(report, queries, keys, biased, causal, dtype)
            passes()
            tell(report, name, Trace.of(passes, report.device), queries, keys, causal)


def _passes(
    report: Report, queries: int, keys: int, biased: bool, causal: bool, dtype: torch.dtype
) -> Callable[[], object]:
    """Forward and backward of attention."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=report.device, dtype=dtype)

    rows, heads, d_kv = _sizes(report)
    vectors = [draw(rows, n, heads, d_kv).transpose(1, 2).requires_grad_() for n in (queries, keys, keys)]
    diagonals = draw(heads, queries + keys - 1).requires_grad_() if biased else None
    along = draw(rows, queries, heads, d_kv).transpose(1, 2)
    learned = [*vectors, *([] if diagonals is None else [diagonals])]

    def passes() -> None:
        for _ in range(TIMES):
            output = flash(*vectors, Pattern(diagonals, None, causal), d_kv**-0.5, 0.0)
            torch.autograd.grad(output, learned, along)

    return passes


def _sizes(report: Report) -> tuple[int, int, int]:
    """Rows, heads and d_kv of a layer of T5 v1.1 base; few in Triton's interpreter."""
    return (1, 2, 16) if report.small else (128, 12, 64)


def tell(report: Report, name: str, kernels: Trace, queries: int, keys: int, causal: bool) -> None:
    """Adds a row for each of this project's kernels, and one for all others, in a trace of TIMES passes."""
    rows, heads, d_kv = _sizes(report)
    pairs = rows * heads * (queries * (queries + 1) // 2 if causal else queries * keys)
    for kernel, (ms, calls) in kernels.sums(lambda one: one.ours or "others").items():
        flops = 2.0 * pairs * d_kv * PRODUCTS.get(kernel, 0) * TIMES
        report.row(
            "kernels", attention=name, kernel=kernel, ms=ms / TIMES, calls=calls / TIMES, tflops=flops / ms / 1e9
        )
    if report.cuda:
        missing = set(PRODUCTS) - {one.ours for one in kernels.kernels}
        report.expect(f"{name}: this project's kernels run", not missing, sorted(missing))
