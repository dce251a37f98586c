"""What does a learned bias cost attention?

    python benchmarks/attention_forms.py [--device cuda] [--threads 1 2] [--precision bf16 fp32] [--lengths 512]

Forward and backward of attention as in T5-v1.1-small (6 heads of 64; on a GPU 12, as in -base) without and with the
bias of relative positions, which learns; in PyTorch's scaled_dot_product_attention with the bias as a matrix; and, on
a GPU, in FlexAttention, whose gradient of the bias is atomic. The bias is one matrix for all rows of the batch.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from harness import Options, Side, Table, compare, main, peak_memory
from torch import Tensor

from pretrain.models.functional.attention_backends import Visibility, attend, logit_bias, toeplitz
from pretrain.models.t5 import RelativePositionBias

LIMIT = """On a CPU softmax, the sum with the bias and its gradient pass over (rows, heads, queries, keys), which no
longer fits a cache from 512 on. In fp32 the products outweigh them; in bf16 on a processor with arithmetic for it they
take more than half of the time, and without that arithmetic the operands are converted as well."""
WIDTH = 64
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


def flexible(queries: Tensor, keys: Tensor, values: Tensor, diagonals: Tensor) -> Tensor:
    """softmax(queries · keysᵀ + bias) · values by FlexAttention; the bias is read by its diagonals, as in `Pattern`."""
    from torch.nn.attention.flex_attention import flex_attention

    last = queries.size(2) - 1

    def biased(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + diagonals[head, last - query + key]

    return flex_attention(queries, keys, values, score_mod=biased, scale=1.0)


def flex(queries: Tensor, keys: Tensor, values: Tensor, bias: RelativePositionBias) -> Tensor:
    return _compiled(flexible)(queries, keys, values, bias(queries.size(2), keys.size(2)))


_made: dict[int, Callable[..., Tensor]] = {}


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return _made.setdefault(id(function), torch.compile(function, dynamic=False))


def measure(options: Options) -> Iterator[Table]:
    forms: dict[str, Form] = {"with bias": with_bias, "without": without, "sdpa, a matrix": materialised}
    if options.cuda:
        forms["Flex"] = flex
    columns = ["length", "rows", "dtype", "threads", *forms, "without ÷ with", "matrix ÷ with"]
    table = Table("Attention", [*columns, *(["GiB of each"] if options.cuda else [])])
    for length in options.arguments.lengths or ((512, 1024, 2048, 4096) if options.cuda else (512, 1024)):
        rows = max(1, (65_536 if options.cuda else 2_048) // length)
        for precision in options.precisions:
            for threads in options.threads[:1] if options.slow(precision) else options.threads:
                sides = {name: side(form, rows, length, precision, options) for name, form in forms.items()}
                result = compare(sides, options, threads)
                ratios = [f"{result.ratio(name):.2f}" for name in ("without", "sdpa, a matrix")]
                cells = [str(result[name]) for name in forms]
                memory = [", ".join(f"{peak_memory(one):.1f}" for one in sides.values())] if options.cuda else []
                table.add(length, rows, precision, threads, *cells, *ratios, *memory, **result.data)
    yield table


def side(form: Form, rows: int, length: int, precision: str, options: Options) -> Side:
    heads = 12 if options.cuda else 6
    generator = torch.Generator().manual_seed(0)
    queries, keys, values, along = (
        torch.randn(rows, length, heads, WIDTH, generator=generator)
        .to(options.device, options.dtype(precision))
        .transpose(1, 2)
        for _ in range(4)
    )
    inputs = [one.requires_grad_() for one in (queries, keys, values)]
    bias = RelativePositionBias(32, 128, heads, True, std=0.5).to(options.device, options.dtype(precision))
    learned = [] if form is without else [bias.weight]
    return lambda: torch.autograd.grad(form(queries, keys, values, bias), [*inputs, *learned], along)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+")


if __name__ == "__main__":
    main(__doc__, measure, LIMIT, add)
