"""Attention of T5 v1.1 base by this project's kernels: the check at a run's start, and the time of each kernel."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from checks.gpu.report import Report
from checks.gpu.trace import OURS, Trace
from checks.gpu.workload import Workload
from pretrain.models.functional.attention_backends import Pattern, flash
from pretrain.training.attention_check import find_problem

PRODUCTS = dict(zip(OURS, (2, 3, 4), strict=True))  # of (queries, keys, d_kv), that each kernel makes
TIMES = 5


def attention(report: Report) -> None:
    work = Workload(report)
    if report.small:
        report.skip("the check at a run's start", "tests/pretrain/training/test_attention_check.py runs it on a CPU")
    else:
        with report.part("the check at a run's start"):
            started = time.perf_counter()
            problem = find_problem(work.config("eager", 2).model, work.batches(2)[:1], torch.bfloat16, report.device)
            report.fact("seconds_of_check", time.perf_counter() - started)
            report.expect("the kernels compute what PyTorch's do", problem is None, problem)
    for name, form in forms(work.inputs, work.targets).items():
        with report.part(name):
            both = passes(form, report.device, report.small)
            both()
            tell(report, name, Trace.of(both, report.device), form)


class Form(NamedTuple):
    """Attention of `queries` to `keys`: `biased` by position, and `causal` or not."""

    queries: int
    keys: int
    biased: bool
    causal: bool


def forms(inputs: int, targets: int) -> dict[str, Form]:
    """Those of a T5."""
    return {
        "encoder": Form(inputs, inputs, True, False),
        "decoder": Form(targets, targets, True, True),
        "cross": Form(targets, inputs, False, False),
    }


def passes(form: Form, device: torch.device, small: bool, rows: int | None = None) -> Callable[[], None]:
    """Takes `repeats(small)` forward and backward passes of attention when called. `rows`: by default those of
    `_sizes`."""
    dtype = torch.float32 if small else torch.bfloat16  # Triton's interpreter has no products in bf16

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    many, heads, d_kv = _sizes(small)
    rows = rows or many
    vectors = [
        draw(rows, n, heads, d_kv).transpose(1, 2).requires_grad_() for n in (form.queries, form.keys, form.keys)
    ]
    diagonals = draw(heads, form.queries + form.keys - 1).requires_grad_() if form.biased else None
    along = draw(rows, form.queries, heads, d_kv).transpose(1, 2)
    learned = [*vectors, *([] if diagonals is None else [diagonals])]

    def both() -> None:
        for _ in range(repeats(small)):
            output = flash(*vectors, Pattern(diagonals, None, form.causal), d_kv**-0.5, 0.0)
            torch.autograd.grad(output, learned, along)

    return both


def repeats(small: bool) -> int:
    """The passes of a trace. One takes seconds in Triton's interpreter."""
    return 1 if small else TIMES


def _sizes(small: bool) -> tuple[int, int, int]:
    """Rows, heads and d_kv of a layer of T5 v1.1 base; few in Triton's interpreter."""
    return (1, 2, 16) if small else (128, 12, 64)


def tell(report: Report, name: str, kernels: Trace, form: Form) -> None:
    """Adds a row for each of this project's kernels, and one for all others, in a trace of `repeats` passes."""
    (rows, heads, d_kv), taken = _sizes(report.small), repeats(report.small)
    pairs = rows * heads * (form.queries * (form.queries + 1) // 2 if form.causal else form.queries * form.keys)
    for kernel, (ms, calls) in kernels.sums(lambda one: one.ours or "others").items():
        flops = 2.0 * pairs * d_kv * PRODUCTS.get(kernel, 0) * taken
        report.row(
            "kernels", attention=name, kernel=kernel, ms=ms / taken, calls=calls / taken, tflops=flops / ms / 1e9
        )
    if report.cuda:
        missing = set(PRODUCTS) - {one.ours for one in kernels.kernels}
        report.expect(f"{name}: this project's kernels run", not missing, sorted(missing))
