"""Attention of queries to keys and values: its bias with all masks, and the backends that compute it.

The bias is a matrix, or a `Pattern`, which this project's kernels read: labels of positions, and ranges that spare the
kernels whole tiles.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import human_size
from data_pipeline.base.processes import available_memory
from pretrain.models.functional.arithmetic import drop, soft_capped
from pretrain.models.kernels import GRANULE, MARGIN

Backend = Literal["sdpa", "triton", "eager"]

WIDEST_HEAD = 256  # d_kv; the tiles of wider heads don't fit a GPU's registers
WIDEST_HEAD_IN_FP32 = 128
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PLANNED = 64  # cuDNN gets lengths that are multiples of it
_backend: Backend | None = None
_QUERIES = 128  # of causal eager attention at a time: a quarter of 512 leaves out three eighths of the work
MASKED = -1e9  # exactly zero after softmax
_SETS = 64  # labels are compared up to this modulus when ranges are made; kernels compare them exactly
_LARGE = 2**30  # bytes; what a matrix of usual size needs isn't compared
_HIDDEN = -1  # the label of a key that nothing sees


class Window(NamedTuple):
    """A query sees only this many keys `before` itself and `after` itself, besides the key in its own position."""

    before: int
    after: int = 0

    def hides_some(self, queries: int, keys: int, causal: bool) -> bool:
        """True if one of the last `queries` of `keys` tokens sees less than without a window."""
        return self.before < keys - 1 or (not causal and self.after < queries - 1)


def refuse_beyond_memory(like: Tensor, queries: int, keys: int, matrices: int) -> None:
    """Raises UserError if so many matrices of queries × keys can't fit into memory, whatever this process frees: Linux
    would kill it."""
    needed = matrices * queries * keys * like.element_size()
    if needed <= _LARGE or like.device.type != "cpu":
        return
    if needed > (most := available_memory() + psutil.Process().memory_info().rss):
        raise UserError(
            f"attention of {queries:,} tokens to {keys:,} needs {human_size(needed)} of memory, and there are "
            f"{human_size(most)}; give shorter texts, or fewer together"
        )


class Visibility(NamedTuple):
    """Which keys a query sees: those that no field hides. By default every query sees every key.

    - `causal`: hides the keys after a query's position. The last query is aligned with the last key.
    - `window`: hides the keys outside the window around a query's position.
    - `key_mask` (batch, keys): hides padding, where the mask is zero.
    - `query_segments` (batch, queries), `key_segments` (batch, keys): hide the other examples of a packed row.
    - `prefix` (batch, keys): `causal` doesn't hide the keys where the prefix is nonzero.
    """

    causal: bool = False
    window: Window | None = None
    key_mask: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    prefix: Tensor | None = None

    @property
    def differs_by_row(self) -> bool:
        """True if rows of a batch may have different masks."""
        tensors = (self.key_mask, self.query_segments, self.key_segments, self.prefix)
        return any(one is not None for one in tensors)

    def mask(self, queries: int, keys: int, device: torch.device, allow_empty: bool = False) -> Tensor | None:
        """True where a query sees a key, broadcasting to (batch, heads, queries, keys); None if nothing is hidden.

        Unless `allow_empty`, a query that would see no key, of padding or without any input, sees every key. Kernels
        that compute the softmax a second time, from the logarithm of its sum, would give a wrong gradient for such a
        query: that logarithm would be MASKED, in which fp32 loses it. cuDNN's gives NaN (PyTorch issue 196678).
        """
        masks = []
        if self.causal:
            past = _band(queries, keys, device, after=0)
            masks.append(past if self.prefix is None else past | self.prefix[:, None, None, :].bool())
        if self.window is not None:
            masks.append(_band(queries, keys, device, self.window.before, self.window.after))
        if self.key_mask is not None:
            masks.append(self.key_mask[:, None, None, :].bool())
        if self.query_segments is not None and self.key_segments is not None:
            masks.append(self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :])
        if not masks:
            return None
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        if allow_empty or (self.key_mask is None and self.query_segments is None):
            return mask  # in the latter case a query sees the key in its own position
        return mask | ~mask.any(dim=-1, keepdim=True)


def _band(queries: int, keys: int, device: torch.device, before: int | None = None, after: int = 0) -> Tensor:
    """(1, 1, queries, keys) True at keys up to `before` positions before a query (None: any number), and `after` it."""
    first = keys - queries  # the key in the position of query 0
    band = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(first + after)
    return (band if before is None else band.triu(first - before))[None, None]


def masked(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias to add to attention logits: `bias`, if any, and MASKED at keys outside `mask`."""
    if mask is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device).expand(mask.shape)
    return bias.masked_fill(~mask, MASKED)


class Labels(NamedTuple):
    """A query sees a key if their labels are equal. All int32 and contiguous, on the device of the attention.

    - `queries` (batch, queries) and `keys` (batch, keys): the labels.
    - `key_ranges` (batch, 2, ⌈queries / GRANULE⌉): the first key that any query of a granule may see, and the key after
      the last.
    - `query_ranges` (batch, 2, ⌈keys / GRANULE⌉): the same for keys, in queries.
    """

    queries: Tensor
    keys: Tensor
    key_ranges: Tensor
    query_ranges: Tensor


def labels(
    queries: int,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
) -> Labels | None:
    """The labels of padding, where `key_mask` (batch, keys) is 0, and of the segments of packed rows.

    None if every query sees every key. Nothing here waits for the device.
    """
    if query_segments is not None and key_segments is not None:
        query_labels, key_labels = query_segments.int(), key_segments.int()
    elif key_mask is not None:
        query_labels, key_labels = (
            key_mask.new_ones(key_mask.size(0), queries, dtype=torch.int32),
            torch.ones_like(key_mask, dtype=torch.int32),
        )
    else:
        return None
    if key_mask is not None:
        key_labels = key_labels.masked_fill(key_mask == 0, _HIDDEN)
    meet = torch.einsum("bqs,bks->bqk", _sets(query_labels), _sets(key_labels)) > 0
    ranges = _ranges(meet, key_labels.size(1)), _ranges(meet.transpose(1, 2), queries)
    return Labels(query_labels.contiguous(), key_labels.contiguous(), *ranges)


def _sets(labels: Tensor) -> Tensor:
    """(batch, granules, _SETS) fp32: 1 where a granule has a label of that remainder."""
    padded = F.pad(labels, (0, -labels.size(1) % GRANULE), value=_HIDDEN)
    members = padded.remainder(_SETS)[..., None] == torch.arange(_SETS, device=labels.device)
    members &= (padded != _HIDDEN)[..., None]
    return members.unflatten(1, (-1, GRANULE)).any(dim=2).float()


def _ranges(meet: Tensor, length: int) -> Tensor:
    """(batch, 2, granules) from `meet` (batch, granules, granules of the other side, which has `length` positions)."""
    others = torch.arange(meet.size(2), device=meet.device)
    start = torch.where(meet, others, meet.size(2)).amin(dim=2) * GRANULE
    end = torch.where(meet, others + 1, 0).amax(dim=2) * GRANULE
    return torch.stack([start, end.clamp(max=length)], dim=1).int().contiguous()


class Pattern(NamedTuple):
    """A bias and masks without a matrix of queries × keys.

    - `diagonals` (heads, queries + keys − 1): the bias. The bias of query i and key j is at queries − 1 − i + j.
    - `labels`: which keys each query sees; None: all.
    - `causal`: no query sees a later key; the last of each are aligned.
    - `window`: no query sees a key outside it.
    - `padded`: the diagonals as kernels read them, for all layers that share them; None: each makes its own.
    """

    diagonals: Tensor | None
    labels: Labels | None
    causal: bool
    window: Window | None = None
    padded: Tensor | None = None

    def matrix(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The bias that means the same, broadcasting to (batch, heads, queries, keys)."""
        bias = None if self.diagonals is None else toeplitz(self.diagonals, keys)
        if self.labels is not None:
            seen = self.labels.queries[:, None, :, None] == self.labels.keys[:, None, None, :]
            bias = masked(bias, seen, dtype)
        return masked(bias, Visibility(self.causal, self.window).mask(queries, keys, device), dtype)


def with_margin(diagonals: Tensor) -> Tensor:
    """The diagonals in fp32, with MARGIN more on both sides."""
    return F.pad(diagonals.float(), (MARGIN, MARGIN))


def toeplitz(diagonals: Tensor, keys: int) -> Tensor:
    """(1, heads, queries, keys) from (heads, queries + keys − 1): the row of a query is a window over its diagonals.

    A query's keys lie side by side: PyTorch's attention copies any other layout in each layer.
    """
    return diagonals.contiguous().unfold(1, keys, 1).flip(1).contiguous()[None]


def logit_bias(x: Tensor, keys: int, seen: Visibility, diagonals: Tensor | None = None) -> Tensor | Pattern | None:
    """The `bias` of `Attention` for queries `x` (batch, queries, d_model), in the form that `attend` computes fastest.

    `diagonals` is the bias of a `Pattern`. Made once for all layers of a stack that see the same. This project's
    kernels don't know prefixes. Raises UserError where the CPU's memory is too small.
    """
    queries = x.size(1)
    if queries > 1 and seen.prefix is None and by_kernel(x):
        found = labels(queries, seen.key_mask, seen.query_segments, seen.key_segments)
        if diagonals is None and found is None and seen.window is None and not seen.causal:
            return None
        padded = None if diagonals is None else with_margin(diagonals)
        return Pattern(diagonals, found, seen.causal, seen.window, padded)
    rows = len(x) if seen.differs_by_row else int(seen.causal or seen.window is not None)
    heads = 1 if diagonals is None else len(diagonals)
    refuse_beyond_memory(x, queries, keys, heads * (rows + (diagonals is not None)))
    mask = seen.mask(queries, keys, x.device)
    return masked(None if diagonals is None else toeplitz(diagonals, keys), mask, x.dtype)


# --- backends ---


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

    `use` selects the backend. With a soft cap, which PyTorch's kernels lack, attention is eager unless the Triton
    kernels are used. Every backend computes the softmax in fp32.
    """
    keys, values = for_each_head(queries, keys), for_each_head(queries, values)
    if bias is None and softcap is not None and queries.size(2) > 1 and by_kernel(queries):
        bias = Pattern(None, None, causal)
    if isinstance(bias, Pattern):
        if queries.size(3) <= (WIDEST_HEAD_IN_FP32 if queries.dtype == torch.float32 else WIDEST_HEAD):
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
    """`attend` by this project's kernel. A query that sees no key gives 0; other backends give a mean of values."""
    # Triton takes 360 ms and 76 MB, and a PyTorch without CUDA lacks it; torch.compile can't look into a stand-in
    from pretrain.models.kernels.flash_operator import attention

    diagonals = pattern.padded
    if diagonals is None and pattern.diagonals is not None:
        diagonals = with_margin(pattern.diagonals)
    before, after = pattern.window or (None, None)
    if pattern.causal:
        after = 0 if after is None else min(after, 0)
    seed = torch.randint(1 << 31, (1,), dtype=torch.int32, device=queries.device) if dropout else None
    sources = [one.transpose(1, 2)[:, :, None] for one in (queries, keys, values)] if joined is None else [joined]
    return attention(sources, diagonals, [*(pattern.labels or ())], seed, before, after, scale, softcap, dropout)[0]


def sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """`attend` by PyTorch's kernels."""
    with sdpa_kernels(queries, keys, masked=bias is not None):
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
        )


def sdpa_kernels(queries: Tensor, keys: Tensor, masked: bool) -> AbstractContextManager[None]:
    """Within the block, PyTorch chooses among the kernels that are right and fast for `queries` and `keys`, each
    (batch, heads, length, d_kv). On a GPU only lengths that are multiples of 64, without a mask, may go to cuDNN.

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


def _softmax(queries: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """The weights of attention (batch, heads, queries, keys)."""
    logits = (queries if scale == 1.0 else queries * scale) @ keys.mT
    if softcap is not None:
        logits = soft_capped(logits, softcap)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def _future(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """(queries, keys) The bias that hides later keys from queries. The first query is at position `first`."""
    return queries.new_full((queries.size(2), keys.size(2)), MASKED).triu(first + 1)
