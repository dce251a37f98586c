"""Attention with a bias that depends on the distance alone, without a matrix of queries × keys.

The bias comes as its diagonals, (heads, queries + keys − 1): T5's relative positions and ALiBi's slopes have that form.
Their gradient is reduced in a fixed order, without atomic additions, so that a run repeats to the bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.backward import backward_diagonals, backward_keys, backward_queries
from pretrain.kernels.forward import forward
from pretrain.kernels.labels import Labels
from pretrain.kernels.tuning import Tiles, fastest

_MARGIN = 128  # unused diagonals on both sides, so that a tile that sticks out reads none of another head


def flash_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    diagonals: Tensor | None = None,
    labels: Labels | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(capped(scale · queries · keysᵀ) + bias) · values, each (batch, heads, length, d_kv), d_kv up to 256; and
    log2 of the softmax's normalisers (batch, heads, queries) in fp32.

    `diagonals` (heads, queries + keys − 1) holds the bias of query i and key j at queries − 1 − i + j. Under `causal`,
    and with a `window` of keys before a query's position and after it, the last query is aligned with the last key.
    `labels` hides padding and other examples. `capped` is softcap · tanh(· / softcap). `dropout` drops weights by a
    seed from PyTorch's generator of the device; normalisers are those before it.

    A query that sees no key gives zeros, and a normaliser of ∞; it and what it would see get no gradient.
    """
    seed = torch.randint(1 << 31, (1,), dtype=torch.int32, device=queries.device) if dropout else None
    label_tensors = [] if labels is None else list(labels)
    before, after = window or (None, None)
    if causal and after is not None:
        causal, after = False, min(after, 0)
    return _flash_attention(
        queries, keys, values, diagonals, label_tensors, seed, causal, before, after, scale, softcap, dropout
    )


@torch.library.custom_op("encdec::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    diagonals: Tensor | None,
    labels: list[Tensor],
    seed: Tensor | None,
    causal: bool,
    before: int | None,
    after: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = (_rows_whole(tensor) for tensor in (q, k, v))
    (batch, heads, queries, _), keys = q.shape, k.size(2)
    out, normalisers = _like_rows(q), q.new_empty(batch, heads, queries, dtype=torch.float32)
    bias = _margined(diagonals)
    query_labels, key_labels, ranges, _ = labels or (None, None, None, None)
    settings = before, after, scale, softcap, dropout
    shared = _shared(q, causal)

    def launch(block: Tiles) -> None:
        forward[_ceil_div(queries, block.rows), batch * heads](
            q, k, v, _from_last_query(bias, queries), query_labels, key_labels, ranges, seed, out, normalisers,
            *_strides(q, k, v, out), _stride(bias), heads, queries, keys, *settings,
            **shared, BLOCK_M=block.rows, BLOCK_N=block.columns, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    fastest("forward", q, _key(q, k, bias, labels, causal, before, after, softcap), launch)
    return out, normalisers


@_flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, diagonals: Any, labels: Any, seed: Any, *_: Any) -> tuple:
    return _like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("encdec::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    diagonals: Tensor | None,
    labels: list[Tensor],
    seed: Tensor | None,
    out: Tensor,
    normalisers: Tensor,
    gradient: Tensor,
    grad_normalisers: Tensor | None,
    causal: bool,
    before: int | None,
    after: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    needs_grad_diagonals: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and, if `needs_grad_diagonals`, diagonals, which are else empty."""
    q, k, v, gradient = (_rows_whole(tensor) for tensor in (q, k, v, gradient))
    (batch, heads, queries, _), keys = q.shape, k.size(2)
    dq, dk, dv, delta = _like_rows(q), _like_rows(k), _like_rows(v), torch.empty_like(normalisers)
    bias = _margined(diagonals)
    at, stride = _from_last_query(bias, queries), _stride(bias)
    query_labels, key_labels, key_ranges, query_ranges = labels or (None, None, None, None)
    grad_normalisers = None if grad_normalisers is None else grad_normalisers.contiguous()
    settings = before, after, scale, softcap, dropout
    shared, key = _shared(q, causal), _key(q, k, bias, labels, causal, before, after, softcap)

    def launch_queries(block: Tiles) -> None:
        backward_queries[_ceil_div(queries, block.rows), batch * heads](
            q, k, v, at, query_labels, key_labels, key_ranges, seed, out, normalisers, gradient,
            grad_normalisers, dq, delta,
            *_strides(q, k, v, out, gradient, dq), stride, heads, queries, keys, *settings,
            **shared, BLOCK_M=block.rows, BLOCK_N=block.columns, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    def launch_keys(block: Tiles) -> None:
        backward_keys[_ceil_div(keys, block.columns), batch * heads](
            q, k, v, at, query_labels, key_labels, query_ranges, seed, normalisers, gradient, delta, dk, dv,
            *_strides(q, k, v, gradient, dk), stride, heads, queries, keys, *settings,
            **shared, BLOCK_M=block.rows, BLOCK_N=block.columns, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    def launch_diagonals(block: Tiles) -> Tensor:
        parts = _empty_parts(q, keys, block.rows)
        backward_diagonals[parts.size(1), parts.size(2), heads](
            q, k, v, at, query_labels, key_labels, key_ranges, seed, normalisers, gradient, delta, parts,
            *_strides(q, k, v, gradient), stride, batch, heads, queries, keys, *settings, parts.size(2),
            **shared, BLOCK=block.rows, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
        return _summed_parts(parts, queries, keys)

    fastest("backward_queries", q, key, launch_queries)  # first: it writes `delta`, which the others read
    fastest("backward_keys", q, key, launch_keys)
    grad_bias = q.new_empty(0)
    if needs_grad_diagonals:
        assert diagonals is not None
        grad_bias = fastest("backward_diagonals", q, key, launch_diagonals).to(diagonals.dtype)
    return dq, dk, dv, grad_bias


@_flash_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, diagonals: Any, labels: Any, seed: Any, out: Any, normalisers: Any, gradient: Any,
    grad_normalisers: Any, causal: bool, before: Any, after: Any, scale: float, softcap: Any, dropout: float,
    needs_grad_diagonals: bool,
) -> tuple:  # fmt: skip
    grad_bias = (
        torch.empty_like(diagonals, memory_format=torch.contiguous_format) if needs_grad_diagonals else q.new_empty(0)
    )
    return _like_rows(q), _like_rows(k), _like_rows(v), grad_bias


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, diagonals, labels, seed, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, diagonals, seed, *output, *labels)


def _differentiate(ctx: Any, gradient: Tensor | None, grad_normalisers: Tensor | None) -> tuple:
    q, k, v, diagonals, seed, out, normalisers, *labels = ctx.saved_tensors
    none = [None] * len(labels), *[None] * (1 + len(ctx.settings))
    if gradient is None and grad_normalisers is None:
        return None, None, None, None, *none
    gradient = torch.zeros_like(out) if gradient is None else gradient
    needs_grad_diagonals = diagonals is not None and ctx.needs_input_grad[3]
    dq, dk, dv, grad_bias = _flash_attention_backward(
        q, k, v, diagonals, labels, seed, out, normalisers, gradient, grad_normalisers, *ctx.settings,
        needs_grad_diagonals,
    )  # fmt: skip
    return dq, dk, dv, grad_bias if needs_grad_diagonals else None, *none


_flash_attention.register_autograd(_differentiate, setup_context=_keep)


def _shared(q: Tensor, causal: bool) -> dict[str, object]:
    """The constants of all kernels. fp32 is multiplied without TF32, unless PyTorch's own products may use it."""
    d_kv = q.size(3)
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "CAUSAL": causal,
        "PRECISION": "tf32" if tf32 else "ieee",
        "D": d_kv,
        "BLOCK_D": max(16, _power_of_two(d_kv)),
    }


def _key(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    labels: list[Tensor],
    causal: bool,
    before: int | None,
    after: int | None,
    softcap: float | None,
) -> tuple:
    """What the best tiles depend on. Rows and lengths count in powers of two: ragged batches aren't measured anew."""
    sizes = [_power_of_two(size) for size in (q.size(0), q.size(2), k.size(2))]
    forms = bias is not None, bool(labels), causal, before, after, softcap is not None
    return *sizes, q.size(1), q.size(3), q.dtype, *forms


# Triton's own are for kernels too, and take 2 µs a call on the host: 30 in a forward and a backward pass.
def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def _power_of_two(number: int) -> int:
    """The least that isn't below `number`."""
    return 1 << (number - 1).bit_length()


def _margined(diagonals: Tensor | None) -> Tensor | None:
    return None if diagonals is None else F.pad(diagonals.float(), (_MARGIN, _MARGIN))


def _from_last_query(bias: Tensor | None, queries: int) -> Tensor | None:
    """A view that begins at the diagonal of distance 0, which kernels index by at_k − at_q."""
    return None if bias is None else bias[:, _MARGIN + queries - 1 :]


def _stride(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.stride(0)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _rows_whole(tensor: Tensor) -> Tensor:
    """`tensor` with the numbers of a row side by side, as kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like_rows(tensor: Tensor) -> Tensor:
    """An empty (batch, heads, length, d_kv) that lies in memory as (batch, length, heads, d_kv), as `o` takes it."""
    batch, heads, length, d_kv = tensor.shape
    return tensor.new_empty(batch, length, heads, d_kv).transpose(1, 2)


_VISITS = 32  # tiles that a program of the diagonals' kernel adds up, at most: enough programs for a GPU


def _empty_parts(q: Tensor, keys: int, block: int) -> Tensor:
    batch, heads, queries, _ = q.shape
    tiles_q, tiles_k = _ceil_div(queries, block), _ceil_div(keys, block)
    splits = _ceil_div(min(tiles_q, tiles_k) * batch, _VISITS)
    return q.new_empty(heads, tiles_q + tiles_k - 1, splits, 2 * block, dtype=torch.float32)


def _summed_parts(parts: Tensor, queries: int, keys: int) -> Tensor:
    """(heads, queries + keys − 1) from the shares of `backward_diagonals`; neighbouring tiles overlap by half."""
    block = parts.size(3) // 2
    earlier, later = (half.flatten(1) for half in parts.sum(dim=2).split(block, dim=2))
    total = F.pad(earlier, (0, block)) + F.pad(later, (block, 0))
    return total[:, -queries % block :][:, : queries + keys - 1].contiguous()
