"""The operator `encdec::flash_attention`: attention with a bias by distance, without a matrix of queries × keys.

It runs the kernels of `flash.py`. The bias comes as its diagonals, (heads, queries + keys − 1) and a margin; T5's
relative positions and ALiBi's slopes have this form. The bias's gradient is summed in a fixed order, without atomic
additions, so that a run repeats to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.models.kernels import MARGIN, OperatorArguments
from pretrain.models.kernels.flash import backward_keys, backward_queries, forward
from pretrain.models.kernels.tiles import tile_sizes


@torch.library.custom_op("encdec::flash_attention", mutates_args=())
def attention(
    sources: list[Tensor], diagonals: Tensor | None, labels: list[Tensor], seed: Tensor | None,
    before: int | None, after: int | None, scale: float, softcap: float | None, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(softcap · tanh(scale · queries · keysᵀ / softcap) + bias) · values, (batch, heads, queries, d_kv).

    Also returns log2 of the softmax's normalisers (batch, heads, queries) in fp32. A query that attends to no key gives
    zeros, and no gradient.

    Args:
        sources: tensors (batch, length, parts, heads, d_kv), d_kv up to 256, whose parts are queries, keys and values,
            in this order. If they are parts of one tensor, so are their gradients.
        diagonals: (heads, MARGIN + queries + keys − 1 + MARGIN), fp32, with the bias of query i and key j at MARGIN +
            queries − 1 − i + j.
        labels: the tensors of `pretrain.models.functional.attention_backends.Labels`; they hide padding and other
            examples.
        before, after: see `OperatorArguments`; the last query is aligned with the last key.
        dropout: the share of weights to drop, by the `seed` (1,).
    """
    q, k, v = map(_rows_whole, _apart(sources))
    out, normalisers = _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    hidden: Sequence[Any] = labels or [None] * 4
    pointers = q, k, v, _bias(diagonals, q), *hidden[:3], seed, out, normalisers
    _launch(forward, True, pointers, (q, k, v, out), (before, after, scale, softcap, dropout))
    return out, normalisers


@attention.register_fake
def _(sources: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    q = _apart(sources)[0]
    return _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("encdec::flash_attention_backward", mutates_args=())
def _attention_backward(
    sources: list[Tensor], diagonals: Tensor | None, labels: list[Tensor], seed: Tensor | None, out: Tensor,
    normalisers: Tensor, gradient: Tensor, needs_grad_diagonals: bool,
    before: int | None, after: int | None, scale: float, softcap: float | None, dropout: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of `sources` and, if `needs_grad_diagonals`, of `diagonals`."""
    q, k, v, gradient = map(_rows_whole, (*_apart(sources), gradient))
    found = [one.new_empty(one.shape) for one in sources]
    (dq, dk, dv), delta = _apart(found), torch.empty_like(normalisers)
    hidden: Sequence[Any] = labels or [None] * 4
    shared = q, k, v, _bias(diagonals, q), *hidden[:2]
    settings = before, after, scale, softcap, dropout
    (batch, heads, queries, d_kv), keys = q.shape, k.size(2)
    block = tile_sizes("backward_queries", q.dtype, d_kv).rows
    shape = batch, heads, -(-queries // block), (-(-keys // block) + 1) * block
    parts = q.new_zeros(shape, dtype=torch.float32) if needs_grad_diagonals else None
    pointers = *shared, hidden[2], seed, out, normalisers, gradient, dq, delta, parts
    _launch(backward_queries, True, pointers, (q, k, v, out, gradient, dq), settings)  # writes `delta`
    pointers_of_keys = *shared, hidden[3], seed, normalisers, gradient, delta, dk, dv
    _launch(backward_keys, False, pointers_of_keys, (q, k, v, gradient, dk), settings)
    if parts is None or diagonals is None:
        return found
    return [*found, _summed(parts, block, queries, diagonals.size(1))]


@_attention_backward.register_fake
def _(
    sources: list[Tensor], diagonals: Tensor | None, labels: list[Tensor], seed: Tensor | None, out: Tensor,
    normalisers: Tensor, gradient: Tensor, needs_grad_diagonals: bool, *settings: float | None,
) -> list[Tensor]:  # fmt: skip
    grad_bias = [diagonals] if diagonals is not None and needs_grad_diagonals else []
    return [one.new_empty(one.shape) for one in [*sources, *grad_bias]]


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    arguments = OperatorArguments(*inputs)
    ctx.sources = len(arguments.sources)
    ctx.settings = arguments.settings
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arguments.sources, arguments.diagonals, arguments.seed, *output, *arguments.labels)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple:
    saved = ctx.saved_tensors  # read once: checkpointing refuses to compute it again
    sources, (diagonals, seed, out, normalisers, *labels) = [*saved[: ctx.sources]], saved[ctx.sources :]
    none: dict[str, Any] = dict.fromkeys(OperatorArguments._fields) | {"labels": [None] * len(labels)}
    if gradient is None:
        return OperatorArguments(**none | {"sources": [None] * len(sources)})
    needs_grad_diagonals = diagonals is not None and OperatorArguments(*ctx.needs_input_grad).diagonals
    found = _attention_backward(
        sources, diagonals, labels, seed, out, normalisers, gradient, needs_grad_diagonals, *ctx.settings
    )
    of_sources = found[: len(sources)]
    of_diagonals = found[len(sources)] if needs_grad_diagonals else None
    return OperatorArguments(**none | {"sources": of_sources, "diagonals": of_diagonals})


attention.register_autograd(_differentiate, setup_context=_keep)


def _launch(kernel: Any, of_queries: bool, pointers: Sequence[Any], strided: Sequence[Tensor], settings: tuple) -> None:
    """Runs `kernel` for each tile of queries (or of keys) of each head, with the strides of `strided`.

    fp32 is multiplied in TF32 only where PyTorch's own matmuls are.
    """
    q, k, _, bias = pointers[:4]
    (batch, heads, queries, d_kv), keys = q.shape, k.size(2)
    rows, columns, warps, stages = tile_sizes(kernel.__name__, q.dtype, d_kv)
    grid = -(-queries // rows) if of_queries else -(-keys // columns), batch * heads
    kernel[grid](
        *pointers, *(stride for tensor in strided for stride in tensor.stride()[:3]),
        0 if bias is None else bias.stride(0), heads, queries, keys, *settings,
        PRECISION="tf32" if q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        D=d_kv, BLOCK_D=max(16, 1 << (d_kv - 1).bit_length()), BLOCK_M=rows, BLOCK_N=columns,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _bias(diagonals: Tensor | None, q: Tensor) -> Tensor | None:
    """`diagonals` from distance 0 on; kernels index them by at_k − at_q."""
    return None if diagonals is None else diagonals[:, MARGIN + q.size(2) - 1 :]


def _apart(sources: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values, each (batch, heads, length, d_kv)."""
    return [one.transpose(1, 2) for source in sources for one in source.unbind(2)]


def _rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` with contiguous rows, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like_rows(tensor: Tensor) -> Tensor:
    """An empty tensor (batch, heads, length, d_kv), laid out as (batch, length, heads, d_kv), as the output matrix
    reads it."""
    batch, heads, length, d_kv = tensor.shape
    return tensor.new_empty(batch, length, heads, d_kv).transpose(1, 2)


def _summed(parts: Tensor, block: int, queries: int, length: int) -> Tensor:
    """The gradient (heads, length) of the diagonals with their margins, from PARTS of `backward_queries`. A tile's
    parts begin `block` diagonals after the next tile's."""
    tiles, width = parts.shape[2:]
    first = MARGIN + queries - tiles * block
    rows = F.pad(parts.sum(dim=0).flip(1), (first, length + block - first - width)).flatten(1)
    return rows[:, : tiles * length].unflatten(1, (tiles, length)).sum(dim=1)
