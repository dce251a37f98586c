"""What does a learned bias cost attention?

    python benchmarks/attention_forms.py [--threads 1 2] [--precision bf16 fp32] [--lengths 512]

Forward and backward of attention as in T5-v1.1-small (6 heads of 64) without and with the bias of relative positions,
which learns; and in PyTorch's scaled_dot_product_attention with the bias as a matrix. The bias is one matrix for all
rows of the batch.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from harness import PRECISIONS, Options, Side, Table, compare, main, slow
from torch import Tensor

from pretrain.models.functional.attention_backends import Visibility, attend, logit_bias, toeplitz
from pretrain.models.t5 import RelativePositionBias

LIMIT = """On a CPU softmax, the sum with the bias and its gradient pass over (rows, heads, queries, keys), which no
longer fits a cache from 512 on. In fp32 the products outweigh them; in bf16 on a processor with arithmetic for it they
take more than half of the time, and without that arithmetic the operands are converted as well."""
HEADS, WIDTH, TOKENS = 6, 64, 2048
Form = Callable[[Tensor, Tensor, Tensor, RelativePositionBias], Tensor]


def with_bias(queries: Tensor, keys: Tensor, values: Tensor, bias: RelativePositionBias) -> Tensor:
    diagonals = bias(queries.size(2), keys.size(2))
    given = logit_bias(queries.transpose(1, 2).flatten(2), keys.size(2), Visibility(), diagonals)
    return attend(queries, keys, values, given, False, 1.0, 0.0)


def without(queries: Tensor, keys: Tensor, values: Tensor, bias: RelativePositionBias) -> Tensor:
    return attend(queries, keys, values, None, False, 1.0, 0.0)


def materialised(queries: Tensor, keys: Tensor, values: Tensor, bias: RelativePositionBias) -> Tensor:
    matrix = toeplitz(bias(queries.size(2), keys.size(2)), keys.size(2)).contiguous()
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=matrix, scale=1.0)


FORMS: dict[str, Form] = {"with bias": with_bias, "without": without, "sdpa, a matrix": materialised}


def measure(options: Options) -> Iterator[Table]:
    columns = ["length", "rows", "dtype", "threads", *FORMS, "without ÷ with", "matrix ÷ with"]
    table = Table("Attention", columns)
    for length in options.arguments.lengths:
        rows = max(1, TOKENS // length)
        for precision in options.precisions:
            for threads in options.threads[:1] if slow(precision) else options.threads:
                sides = {name: side(form, rows, length, PRECISIONS[precision]) for name, form in FORMS.items()}
                result = compare(sides, options, threads)
                ratios = [f"{result.ratio(name):.2f}" for name in ("without", "sdpa, a matrix")]
                times = [result[name] for name in FORMS]
                table.add(length, rows, precision, threads, *times, *ratios, **result.data)
    yield table


def side(form: Form, rows: int, length: int, dtype: torch.dtype) -> Side:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, along = (
        torch.randn(rows, length, HEADS, WIDTH, generator=generator).to(dtype).transpose(1, 2) for _ in range(4)
    )
    inputs = [one.requires_grad_() for one in (queries, keys, values)]
    bias = RelativePositionBias(32, 128, HEADS, True, std=0.5).to(dtype)
    learned = [] if form is without else [bias.weight]
    return lambda: torch.autograd.grad(form(queries, keys, values, bias), [*inputs, *learned], along)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024])


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
