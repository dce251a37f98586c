"""Attention of queries to keys and values, and which of its implementations computes it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.models.functional.arithmetic import drop, soft_capped
from pretrain.models.functional.attention_bias import MASKED, Pattern, refuse_beyond_memory, with_margin

Backend = Literal["sdpa", "triton", "eager"]

WIDEST_HEAD = 256  # d_kv; the tiles of wider heads don't fit a GPU's registers
WIDEST_HEAD_IN_FP32 = 128
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PLANNED = 64  # cuDNN gets lengths that are multiples of it
_backend: Backend | None = None


def use(backend: Backend | None) -> None:
    """From now on, attention in this process is computed by `backend`.

    - sdpa: PyTorch's `scaled_dot_product_attention`, with all biases and masks as its mask.
    - triton: `pretrain.models.kernels`, where they know the form of the mask; else sdpa. On GPUs alone.
    - eager: two products with a softmax between them.
    - None: the faster of sdpa and eager on a CPU, sdpa on a GPU.

    Layers that are compiled already keep what they were compiled for.
    """
    global _backend
    _backend = backend


@contextmanager
def using(backend: Backend | None) -> Iterator[None]:
    """`use` within the block."""
    before = _backend
    use(backend)
    try:
        yield
    finally:
        use(before)


def by_kernel(x: Tensor) -> bool:
    """True if this project's kernels compute attention in the dtype of `x`."""
    return _backend == "triton" and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def takes_head(queries: Tensor) -> bool:
    """True if these kernels compute heads as wide as those of `queries` (batch, heads, length, d_kv)."""
    return queries.size(3) <= (WIDEST_HEAD_IN_FP32 if queries.dtype == torch.float32 else WIDEST_HEAD)


def is_eager(queries: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """True if attention that no kernel of this project computes is eager.

    On a CPU PyTorch's kernels take up to three times as long in bf16, and longer in fp32 with dropout or a bias that
    learns.
    """
    if _backend is not None or queries.device.type != "cpu":
        return _backend == "eager"
    learned = bias is not None and bias.requires_grad
    return queries.dtype == torch.bfloat16 or dropout > 0 or learned


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | Pattern | None,
    causal: bool,
    scale: float,
    dropout: float,
    softcap: float | None = None,
    joined: Tensor | None = None,
) -> Tensor:
    """softmax(capped(scale · queries · keysᵀ) + bias) · values, each (batch, heads, length, d_kv).

    `bias` excludes `causal`. Keys and values may have fewer heads: each is then for as many consecutive heads of
    queries. `capped` is `soft_capped`, or nothing without a `softcap`. `joined` (batch, length, 3, heads, d_kv): the
    tensor that queries, keys and values are parts of, if there is one; our kernel returns its gradient whole.

    `use` chooses the form. Only soft caps, which PyTorch's kernels don't have, are eager
    without a kernel of ours. The softmax is in fp32 in all forms.
    """
    keys, values = for_each_head(queries, keys), for_each_head(queries, values)
    if bias is None and softcap is not None and queries.size(2) > 1 and by_kernel(queries):
        bias = Pattern(None, None, causal)
    if isinstance(bias, Pattern):
        if takes_head(queries):
            return flash(queries, keys, values, bias, scale, dropout, softcap, joined)
        bias, causal = bias.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device), False
    if softcap is not None or is_eager(queries, bias, dropout):
        return eager(queries, keys, values, bias, causal, scale, dropout, softcap)
    return sdpa(queries, keys, values, bias, causal, scale, dropout)


@torch.no_grad()
def attention_weights(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor | Pattern | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The softmax in `attend`, (batch, heads, queries, keys), which the fast kernels never hold.

    Raises UserError where the CPU's memory is too small.
    """
    keys = for_each_head(queries, keys)
    refuse_beyond_memory(queries, queries.size(2), keys.size(2), queries.size(0) * queries.size(1))
    if isinstance(bias, Pattern):
        bias = bias.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device)
    return _softmax(queries, keys, _future(queries, keys, 0) if causal else bias, scale, softcap)


def apart(joined: Tensor) -> tuple[Tensor, ...]:
    """Each part (batch, heads, length, d_kv) of a tensor (batch, length, parts, heads, d_kv)."""
    return tuple(one.transpose(1, 2) for one in joined.unbind(2))


def for_each_head(queries: Tensor, x: Tensor) -> Tensor:
    """Keys or values (batch, heads of keys, length, d_kv), each head in a row for each of its heads of queries."""
    groups = queries.size(1) // x.size(1)
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def flash(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pattern: Pattern,
    scale: float,
    dropout: float,
    softcap: float | None = None,
    joined: Tensor | None = None,
) -> Tensor:
    """`attend` by this project's kernel. A query that sees nothing gives 0, where the others give a mean of values."""
    # Triton takes 360 ms and 76 MB, and a PyTorch without CUDA lacks it; torch.compile can't look into a stand-in
    from pretrain.models.kernels.flash_operator import flash_attention

    diagonals = pattern.padded
    if diagonals is None and pattern.diagonals is not None:
        diagonals = with_margin(pattern.diagonals)
    return flash_attention(
        queries,
        keys,
        values,
        diagonals,
        labels=pattern.labels or (),
        causal=pattern.causal,
        window=pattern.window,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        joined=joined,
    )


def sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """`attend` by PyTorch's kernels."""
    with sdpa_kernels(queries, keys, masked=bias is not None):
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
        )


def sdpa_kernels(queries: Tensor, keys: Tensor, masked: bool) -> AbstractContextManager[None]:
    """Within the block, PyTorch chooses among those of its kernels that are right and fast for these, each (batch,
    heads, length, d_kv). On a GPU only lengths that are multiples of 64, without a mask, may go to cuDNN.

    - cuDNN makes a plan for each pair of lengths, which takes 0.4 s forward and 0.6 s backward. Ragged batches would
      have one at each new width. Multiples of 64 are few, and full rows and packed ones have them.
    - With a mask, its gradient may be NaN on H100 and H200 (PyTorch issue 196678): where all keys of a query are masked
      and the length, divided by 128, leaves 64.
    """
    if queries.device.type != "cuda" or not (masked or queries.size(2) % _PLANNED or keys.size(2) % _PLANNED):
        return nullcontext()
    return sdpa_kernel(_WITHOUT_CUDNN)


def eager(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    softcap: float | None = None,
) -> Tensor:
    """`attend` as two products with a softmax between them, which keep (batch, heads, queries, keys) in memory.

    Where it is causal, some queries at a time: only with the keys up to the last of them.
    """
    if not causal:
        return drop(_softmax(queries, keys, bias, scale, softcap), dropout) @ values
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    found = []
    for first in range(0, queries.size(2), _QUERIES):
        some, seen = queries[:, :, first : first + _QUERIES], slice(first + _QUERIES)
        earlier, future = keys[:, :, seen], _future(some, keys[:, :, seen], first)
        found.append(eager(some, earlier, values[:, :, seen], future, False, scale, dropout, softcap))
    return torch.cat(found, dim=2)


_QUERIES = 128  # at a time: a quarter of 512 queries leaves out three eighths of the work


def _softmax(queries: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """The weights of attention (batch, heads, queries, keys)."""
    logits = (queries if scale == 1.0 else queries * scale) @ keys.mT
    if softcap is not None:
        logits = soft_capped(logits, softcap)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def _future(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """(queries, keys) The bias that hides later keys from queries, of which the first stands at `first`."""
    return queries.new_full((queries.size(2), keys.size(2)), MASKED).triu(first + 1)
