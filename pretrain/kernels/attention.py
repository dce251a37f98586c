"""Attention with a bias that depends on the distance alone, without a matrix of queries × keys.

The bias comes as its diagonals, (heads, queries + keys − 1): T5's relative positions and ALiBi's slopes have that form.
Their gradient is reduced in a fixed order, without atomic additions, so that a run repeats to the bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.flash import backward_keys, backward_queries, forward
from pretrain.kernels.tiles import tile_sizes

_MARGIN = 128  # unused diagonals on both sides, so that a tile that sticks out reads none of another head


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, diagonals: Tensor | None = None, labels: Sequence[Tensor] = (),
    causal: bool = False, window: tuple[int, int] | None = None,
    scale: float = 1.0, softcap: float | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """softmax(capped(scale · queries · keysᵀ) + bias) · values, each (batch, heads, length, d_kv), d_kv up to 256.

    `diagonals` (heads, queries + keys − 1) holds the bias of query i and key j at queries − 1 − i + j. Under `causal`,
    and with a `window` of keys before a query's position and after it, the last query is aligned with the last key.
    `labels` are those of `pretrain.functional.attention_bias` and hide padding and other examples. `capped` is
    softcap · tanh(· / softcap). `dropout` drops weights by a seed from PyTorch's generator of the device.

    A query that sees no key gives zeros; it and what it would see get no gradient.
    """
    seed = torch.randint(1 << 31, (1,), dtype=torch.int32, device=queries.device) if dropout else None
    before, after = window or (None, None)
    if causal:
        after = 0 if after is None else min(after, 0)
    return _attention(queries, keys, values, diagonals, [*labels], seed, before, after, scale, softcap, dropout)[0]


@torch.library.custom_op("encdec::flash_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Tensor | None, labels: list[Tensor], seed: Tensor | None,
    before: int | None, after: int | None, scale: float, softcap: float | None, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and log2 of the softmax's normalisers (batch, heads, queries) in fp32."""
    q, k, v = map(_rows_whole, (q, k, v))
    out, normalisers = _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    hidden: Sequence[Any] = labels or [None] * 4
    pointers = q, k, v, _bias(diagonals, q), *hidden[:3], seed, out, normalisers
    _launch(forward, True, pointers, (q, k, v, out), before, after, scale, softcap, dropout)
    return out, normalisers


@_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("encdec::flash_attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Tensor | None, labels: list[Tensor], seed: Tensor | None, out: Tensor,
    normalisers: Tensor, gradient: Tensor, needs_grad_diagonals: bool,
    before: int | None, after: int | None, scale: float, softcap: float | None, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys, values and, if `needs_grad_diagonals`, diagonals, which are else empty."""
    q, k, v, gradient = map(_rows_whole, (q, k, v, gradient))
    dq, dk, dv, delta = _like_rows(q), _like_rows(k), _like_rows(v), torch.empty_like(normalisers)
    hidden: Sequence[Any] = labels or [None] * 4
    shared = q, k, v, _bias(diagonals, q), *hidden[:2]
    settings = before, after, scale, softcap, dropout
    (batch, heads, queries, d_kv), keys = q.shape, k.size(2)
    block = tile_sizes("backward_queries", q.dtype, d_kv).rows
    shape = batch, heads, -(-queries // block), (-(-keys // block) + 1) * block
    parts = q.new_zeros(shape, dtype=torch.float32) if needs_grad_diagonals else None
    pointers = *shared, hidden[2], seed, out, normalisers, gradient, dq, delta, parts
    _launch(backward_queries, True, pointers, (q, k, v, out, gradient, dq), *settings)  # writes `delta`
    pointers_of_keys = *shared, hidden[3], seed, normalisers, gradient, delta, dk, dv
    _launch(backward_keys, False, pointers_of_keys, (q, k, v, gradient, dk), *settings)
    if parts is None or diagonals is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, _summed(parts, block, queries, keys).to(diagonals.dtype)


@_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, diagonals: Tensor | None, *others: Any) -> tuple:
    grad_bias = diagonals.new_empty(diagonals.shape) if diagonals is not None and others[5] else q.new_empty(0)
    return _like_rows(q), _like_rows(k), _like_rows(v), grad_bias


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, diagonals, labels, seed, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, diagonals, seed, *output, *labels)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple:
    q, k, v, diagonals, seed, out, normalisers, *labels = ctx.saved_tensors
    none = [None] * len(labels), *[None] * (1 + len(ctx.settings))
    if gradient is None:
        return None, None, None, None, *none
    needs_grad_diagonals = diagonals is not None and ctx.needs_input_grad[3]
    dq, dk, dv, grad_bias = _attention_backward(
        q, k, v, diagonals, labels, seed, out, normalisers, gradient, needs_grad_diagonals, *ctx.settings
    )
    return dq, dk, dv, grad_bias if needs_grad_diagonals else None, *none


_attention.register_autograd(_differentiate, setup_context=_keep)


def _launch(
    kernel: Any, of_queries: bool, pointers: Sequence[Any], strided: Sequence[Tensor], *settings: float | None
) -> None:
    """Runs a program for each tile of queries, or of keys, of each head. Its strides are those of `strided`.

    fp32 is multiplied without TF32, unless PyTorch's own products may use it.
    """
    q, k, _, bias, *_ = pointers
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
    """The diagonals in fp32 from that of distance 0 on, which kernels index by at_k − at_q."""
    return None if diagonals is None else F.pad(diagonals.float(), (_MARGIN, _MARGIN))[:, _MARGIN + q.size(2) - 1 :]


def _rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` with the numbers of a row side by side, as kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like_rows(tensor: Tensor) -> Tensor:
    """An empty (batch, heads, length, d_kv) that lies in memory as (batch, length, heads, d_kv), as `o` takes it."""
    batch, heads, length, d_kv = tensor.shape
    return tensor.new_empty(batch, length, heads, d_kv).transpose(1, 2)


def _summed(parts: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """(heads, queries + keys − 1) from the parts of `backward_queries`: a tile's are `block` after the next one's."""
    tiles, width = parts.shape[2:]
    rows = F.pad(parts.sum(dim=0).flip(1), (0, tiles * block)).flatten(1)
    length = width + (tiles - 1) * block
    shifted = rows[:, : tiles * length].unflatten(1, (tiles, length)).sum(dim=1)
    return shifted[:, -queries % block :][:, : queries + keys - 1].contiguous()
