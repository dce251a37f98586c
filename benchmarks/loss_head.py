"""What does the loss of the output layer cost beside PyTorch's?

    python benchmarks/loss_head.py [--threads 1 2] [--precision bf16 fp32]

Forward and backward of the loss of 512 positions over BART's vocabulary, from the states of the last layer: the output
matrix with this project's losses; with F.cross_entropy; and F.linear_cross_entropy, where this PyTorch has it. In every
other row a third of the positions has no target. In bf16 on a CPU without arithmetic for it there are 16 positions.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from harness import PRECISIONS, Options, Side, Table, compare, main, slow
from torch import Tensor
from torch.func import functional_call

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.config.model_config import ModelConfig
from pretrain.models.model import Head

LIMIT = """The three products with the matrix of 50,265 × 768 take most of the time, in fp32 more than nine tenths, and
are the same on all sides where every position has a target. The rest is two passes of exponentials over the logits, a
few rows at a time in a cache. Ours leaves out positions without a target."""
VOCABULARY, WIDTH = 50_265, 768
CONFIG = ModelConfig(family="none")
with torch.device("meta"):
    HEAD = Head(WIDTH, VOCABULARY, std=1.0)


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), labels, ignore_index=IGNORE_INDEX)


def ours(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = functional_call(HEAD, {"weight": weight}, (x[None], labels[None], CONFIG))
    return losses.sum() / (labels != IGNORE_INDEX).sum()


def fused(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, weight, labels, ignore_index=IGNORE_INDEX)  # type: ignore[attr-defined,unused-ignore]


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "F.cross_entropy": plain}
if hasattr(F, "linear_cross_entropy"):
    FORMS["F.linear_cross_entropy"] = fused


def measure(options: Options) -> Iterator[Table]:
    table = Table("Loss head", ["dtype", "threads", "positions", "without target", *FORMS, "ratio"])
    for precision in options.precisions:
        is_slow = slow(precision)
        rows = 16 if is_slow else 512
        for threads in options.threads[:1] if is_slow else options.threads:
            for ignored in (0, rows // 3):
                sides = {name: side(form, rows, ignored, PRECISIONS[precision]) for name, form in FORMS.items()}
                result = compare(sides, options, threads, rounds=1 if is_slow else 3)
                times = [result[name] for name in FORMS]
                ratio = f"{result.ratio(result.fastest_peer):.2f}"
                table.add(precision, threads, rows, f"{ignored / rows:.0%}", *times, ratio, **result.data)
    yield table


def side(form: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int, ignored: int, dtype: torch.dtype) -> Side:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, WIDTH, generator=generator).mul_(0.05).to(dtype).requires_grad_()
        for size in (rows, VOCABULARY)
    )
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    labels[:ignored] = IGNORE_INDEX
    return lambda: torch.autograd.grad(form(x, weight, labels), (x, weight))


if __name__ == "__main__":
    main(__doc__, measure, LIMIT)
