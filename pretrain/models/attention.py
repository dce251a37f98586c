"""Multi-head attention (Vaswani et al. 2017, section 3.2) with an additive bias, and its key-value caches.

Options of later models: fewer heads of keys and values (Ainslie et al. 2023), norms of queries and keys, soft caps.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.config.models import Heads
from pretrain.functional.dropout import drop
from pretrain.functional.numerics import soft_capped
from pretrain.kernels.matmul import matmul
from pretrain.models.attention_backend import by_kernel, is_eager, takes_head
from pretrain.models.attention_masks import AttentionMask
from pretrain.models.layers import Linear, fused_linear, one_use
from pretrain.models.logit_bias import Pattern
from pretrain.models.positions import Rotary, apply_rotary
from pretrain.models.visibility import MASKED

KeysAndValues = tuple[Tensor, Tensor]
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class KeyValueCache:
    """Keys and values of one attention layer, each (batch, heads of keys, length, d_kv). Each decoding step appends to
    them."""

    def __init__(self) -> None:
        self.entries: KeysAndValues | None = None

    @property
    def length(self) -> int:
        return self.entries[0].size(2) if self.entries else 0

    def update(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Appends the keys and values that `project` computes; returns all of them."""
        new = project()
        if self.entries:
            new = torch.cat([self.entries[0], new[0]], dim=2), torch.cat([self.entries[1], new[1]], dim=2)
        self.entries = new
        return new

    def select(self, rows: Tensor) -> None:
        """Keeps only these `rows` (n,) of the batch, in this order; beam search reorders hypotheses this way."""
        if self.entries:
            self.entries = self.entries[0].index_select(0, rows), self.entries[1].index_select(0, rows)


class MemoryCache(KeyValueCache):
    """Keys and values of an encoder's output, projected once."""

    def update(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        if self.entries is None:
            keys, values = project()
            self.entries = keys.contiguous(), values.contiguous()  # each decoding step reads them
        return self.entries


class Attention(nn.Module):
    """Self-attention, or cross-attention when `memory` is given.

    Each head of keys and values is for as many consecutive heads of queries. `scaled=False` is T5's form: logits are
    not divided by √d_kv; the initialisation of `q` carries that factor instead.
    `std` initialises all four projections, and `out_std` overrides it for `o`. None: T5's values, from the fan-in.
    The four projections stay separate matrices because `q` has a scale of its own: optimizers that measure a
    parameter's RMS (Adafactor, AdamWScale) must see it. `fused`: `fused_linear` may multiply by them at once.

    - `memory_width`: that of `memory`; None: d_model.
    - `softcap`: logits stay within ± this.
    - `head_norm`: makes the norm of each head's queries, and that of its keys, which come before rotation.
    """

    def __init__(
        self,
        heads: Heads,
        dropout_rate: float = 0.0,
        *,
        scaled: bool = False,
        bias: bool = False,
        std: float | None = None,
        out_std: float | None = None,
        memory_width: int | None = None,
        softcap: float | None = None,
        head_norm: Callable[[], nn.Module] | None = None,
    ):
        super().__init__()
        d_model, d_kv = heads.d_model, heads.d_kv
        inner, inner_kv = heads.num_heads * d_kv, heads.kv_heads * d_kv
        memory_size = memory_width or d_model
        self.d_kv, self.width = d_kv, inner
        self.fused = False
        self.dropout_rate = dropout_rate
        self.scale = heads.attention_scalar**-0.5 if scaled else 1.0
        self.softcap = softcap
        self.q = Linear(d_model, inner, std or (d_model**-0.5 if scaled else (d_model * d_kv) ** -0.5), bias)
        self.k = Linear(memory_size, inner_kv, std or memory_size**-0.5, bias)
        self.v = Linear(memory_size, inner_kv, std or memory_size**-0.5, bias)
        self.o = Linear(inner, d_model, out_std or std or inner**-0.5, bias)
        self.q_norm = head_norm() if head_norm else None
        self.k_norm = head_norm() if head_norm else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: AttentionMask = AttentionMask(),
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to `memory` (batch, keys, d_model), by default to itself.

        With a `cache`, `x` and `memory` hold new tokens only.
        """
        x = one_use(x)
        if memory is None and cache is None:
            queries, keys, values = self._projected(x, self.q, self.k, self.v)
            queries = _with_positions(queries, self.q_norm, mask.rotary)
            return self._attend(queries, _with_positions(keys, self.k_norm, mask.rotary), values, mask)
        queries = self.queries(x, mask.rotary)

        def project() -> KeysAndValues:
            if memory is None:
                return self.keys_and_values(x, mask.rotary)
            return self.keys_and_values(one_use(memory), mask.memory_rotary)

        keys, values = project() if cache is None else cache.update(project)
        return self._attend(queries, keys, values, mask)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """The layer's output (batch, queries, d_model)."""
        dropout = self.dropout_rate if self.training else 0.0
        context = attend(queries, keys, values, mask.bias, mask.is_causal, self.scale, dropout, self.softcap)
        return self.output(context)

    def output(self, context: Tensor) -> Tensor:
        """(batch, queries, d_model) from the heads' values, (batch, heads, queries, d_kv)."""
        return self.o(context.transpose(1, 2).flatten(2))

    def queries(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Those of `x` (batch, length, d_model): (batch, heads, length, d_kv)."""
        (queries,) = self._projected(x, self.q)
        return _with_positions(queries, self.q_norm, rotary)

    def keys_and_values(self, source: Tensor, rotary: Rotary | None = None) -> KeysAndValues:
        """Those of `source` (batch, length, width), each (batch, heads of keys, length, d_kv)."""
        keys, values = self._projected(source, self.k, self.v)
        return _with_positions(keys, self.k_norm, rotary), values

    def _projected(self, x: Tensor, *matrices: Linear) -> list[Tensor]:
        """`x` (batch, length, d_model) times each of `matrices`: (batch, heads, length, d_kv)."""
        found = fused_linear(x, *matrices, fused=self.fused)
        return [one.unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for one in found]


def _with_positions(heads: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
    """Queries or keys (batch, heads, length, d_kv), normalised and then rotated to their positions."""
    heads = heads if norm is None else norm(heads)
    return heads if rotary is None else apply_rotary(heads, rotary)


_recorded: list[Tensor] | None = None  # where `attend` leaves its weights


@contextlib.contextmanager
def recording_weights() -> Iterator[list[Tensor]]:
    """Within the block, each call of `attend` appends its weights (batch, heads, queries, keys), for pictures of them.

    The fast kernels never hold these weights, so they are computed apart.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | Pattern | None,
    causal: bool,
    scale: float,
    dropout: float,
    softcap: float | None = None,
) -> Tensor:
    """softmax(capped(scale · queries · keysᵀ) + bias) · values, each (batch, heads, length, d_kv).

    `bias` excludes `causal`. Keys and values may have fewer heads: each is then for as many consecutive heads of
    queries. `capped` is `soft_capped`, or nothing without a `softcap`.

    `pretrain.models.attention_backend` chooses the form. Only soft caps, which PyTorch's kernels don't have, are eager
    without a kernel of ours. The softmax is in fp32 in all forms.
    """
    keys, values = for_each_head(queries, keys), for_each_head(queries, values)
    if bias is None and softcap is not None and queries.size(2) > 1 and by_kernel(queries):
        bias = Pattern(None, None, causal)
    if isinstance(bias, Pattern):
        if takes_head(queries) and _recorded is None:
            return flash(queries, keys, values, bias, scale, dropout, softcap)
        bias, causal = bias.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device), False
    if _recorded is not None:
        seen = _future(queries, keys, 0) if causal else bias
        _recorded.append(_softmax(queries, keys, seen, scale, softcap).detach())
    if softcap is not None or is_eager(queries, bias, dropout):
        return eager(queries, keys, values, bias, causal, scale, dropout, softcap)
    return sdpa(queries, keys, values, bias, causal, scale, dropout)


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
) -> Tensor:
    """`attend` by this project's kernel. A query that sees nothing gives 0, where the others give a mean of values."""
    from pretrain.kernels.attention import flash_attention  # imports Triton, which only GPUs need

    return flash_attention(
        queries, keys, values, pattern.diagonals, pattern.labels or (), pattern.causal, pattern.window,
        scale, softcap, dropout,
    )  # fmt: skip


def sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """`attend` by PyTorch's kernels."""
    with sdpa_kernels(queries.device, masked=bias is not None):
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
        )


def sdpa_kernels(device: torch.device, masked: bool) -> AbstractContextManager[None]:
    """Within the block, PyTorch chooses among those of its kernels that are right on `device`.

    With a mask, cuDNN's may give a NaN gradient on H100 and H200 (PyTorch issue 196678): where all keys of a query are
    masked and the length, divided by 128, leaves 64.
    """
    return sdpa_kernel(_WITHOUT_CUDNN) if masked and device.type == "cuda" else nullcontext()


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
        return _eager(queries, keys, values, bias, scale, dropout, softcap)
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    found = []
    for first in range(0, queries.size(2), _QUERIES):
        some, seen = queries[:, :, first : first + _QUERIES], slice(first + _QUERIES)
        earlier, their_values = keys[:, :, seen], values[:, :, seen]
        future = _future(some, earlier, first)
        found.append(_eager(some, earlier, their_values, future, scale, dropout, softcap))
    return torch.cat(found, dim=2)


_QUERIES = 128  # at a time: a quarter of 512 queries leaves out three eighths of the work


def _eager(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    return matmul(drop(_softmax(queries, keys, bias, scale, softcap), dropout), values)


def _softmax(queries: Tensor, keys: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """The weights of attention (batch, heads, queries, keys)."""
    logits = matmul(queries if scale == 1.0 else queries * scale, keys.mT)
    if softcap is not None:
        logits = soft_capped(logits, softcap)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def _future(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """(queries, keys) The bias that hides later keys from queries, of which the first stands at `first`."""
    return queries.new_full((queries.size(2), keys.size(2)), MASKED).triu(first + 1)
