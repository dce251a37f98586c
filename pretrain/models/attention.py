"""Multi-head attention (Vaswani et al. 2017, section 3.2) with an additive bias, its masks and its key-value caches.

Options of later models: fewer heads of keys and values (Ainslie et al. 2023), norms of queries and keys, soft caps.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.models.functional.attention_backends import (
    Pattern,
    Visibility,
    apart,
    attend,
    attention_weights,
    logit_bias,
)
from pretrain.models.layers import LayerConfig, Linear, fused_linear, grad_barrier, joined_linear
from pretrain.models.positions import Rotary, apply_rotary

KeysAndValues = tuple[Tensor, Tensor]


class AttentionInputs(NamedTuple):
    """The tensors of a batch that attention reads, by their names. None: no padding, one example a row, positions
    from 0.

    Masks (batch, length) are nonzero at real tokens. Segments keep the examples of a packed row apart. Positions count
    within an example; relative positions don't need them, since packing keeps distances inside an example.
    `prefix_mask` (batch, length) is nonzero at tokens that all tokens of their example may see, before them or after.
    """

    encoder_attention_mask: Tensor | None = None
    encoder_segment_ids: Tensor | None = None
    encoder_positions: Tensor | None = None
    decoder_segment_ids: Tensor | None = None
    decoder_positions: Tensor | None = None
    prefix_mask: Tensor | None = None


class AttentionMask(NamedTuple):
    """The bias of a layer's attention logits, which includes all masks, and its rotary positions.

    `bias` broadcasts to (batch, heads, queries, keys). For a plain causal mask, set `is_causal` and leave `bias` None:
    the fastest kernels then run. `rotary` rotates queries, and the keys of self-attention, by their positions.
    `memory_rotary` rotates the keys of cross-attention by the positions of the encoder's states.
    """

    bias: Tensor | Pattern | None = None
    rotary: Rotary | None = None
    is_causal: bool = False
    memory_rotary: Rotary | None = None


def self_attention_mask(
    x: Tensor, keys: int, seen: Visibility, rotary: Rotary | None = None, diagonals: Tensor | None = None
) -> AttentionMask:
    """The mask of `x` (batch, queries, d_model), the last of `keys` tokens. `diagonals`: as in `logit_bias`."""
    queries = x.size(1)
    seen = seen._replace(causal=seen.causal and queries > 1)  # a single query is the last: no key is after it
    only_causal = seen.causal and seen.window is None and diagonals is None and not seen.differs_by_row
    if only_causal and queries == keys:
        return AttentionMask(None, rotary, is_causal=True)
    return AttentionMask(logit_bias(x, keys, seen, diagonals), rotary)


def positions_from(start: int, length: int, device: torch.device, positions: Tensor | None = None) -> Tensor:
    """Positions (length,) from `start` on, or `positions` (batch, length) of packed examples."""
    return torch.arange(start, start + length, device=device) if positions is None else positions


def real_positions(mask: Tensor) -> Tensor:
    """Positions (batch, length) that count only real tokens: [0, 0, 1, 1, 1] → [0, 0, 0, 1, 2]."""
    return (mask.bool().cumsum(dim=1) - 1).clamp(min=0)


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
    """Self-attention, or cross-attention when `memory` is given: states, or their `keys_and_values`.

    Several consecutive heads of queries share a head of keys and values, if there are fewer of these. The four
    projections stay separate matrices because `q` has a scale of its own: an optimizer that measures a parameter's
    RMS must see it. `fused`: `fused_linear` may multiply by them at once. `merged`: keys and values
    of `memory` are made by the same matrices as the queries' own. `memory_width`: the width of `memory`; None: d_model.
    `record`: called with the weights (batch, heads, queries, keys) of each pass, to draw them; None: off.
    """

    merged: ClassVar[bool] = False
    record: Callable[[Tensor], None] | None = None

    def __init__(self, settings: LayerConfig, memory_width: int | None = None):
        super().__init__()
        heads = settings.heads
        std = settings.std
        bias = settings.biases
        d_model, d_kv = heads.d_model, heads.d_kv
        inner, inner_kv = heads.num_heads * d_kv, heads.kv_heads * d_kv
        memory_size = memory_width or d_model
        self.d_kv, self.width = d_kv, inner
        self.fused = False
        self.dropout_rate, self.softcap = settings.attention_dropout_rate, settings.attention_softcap
        self.scale = heads.attention_scalar**-0.5 if settings.scaled else 1.0
        self.q = Linear(d_model, inner, std or (d_model if settings.scaled else d_model * d_kv) ** -0.5, bias)
        self.k = Linear(memory_size, inner_kv, std or memory_size**-0.5, bias)
        self.v = Linear(memory_size, inner_kv, std or memory_size**-0.5, bias)
        self.o = Linear(inner, d_model, settings.out_std or std or inner**-0.5, bias)
        self.q_norm, self.k_norm = settings.new_head_norm(), settings.new_head_norm()
        self.alike = inner_kv == inner and self.q_norm is None  # queries, keys, values: one shape, no norms

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeysAndValues | None = None,
        mask: AttentionMask = AttentionMask(),
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to `memory` (batch, keys, d_model), by default to itself.

        With a `cache`, `x` and `memory` hold new tokens only.
        """
        x, joined = grad_barrier(x), None
        if memory is None:
            whole = self.alike and mask.rotary is None and cache is None
            joined = joined_linear(x, self.q, self.k, self.v, fused=self.fused and whole)
            if joined is None:
                products = fused_linear(x, self.q, self.k, self.v, fused=self.fused)
                queries, keys, values = [self._heads(product) for product in products]
            else:
                joined = joined.unflatten(-1, (3, -1, self.d_kv))
                queries, keys, values = apart(joined)
            queries = _with_positions(queries, self.q_norm, mask.rotary)
            own = _with_positions(keys, self.k_norm, mask.rotary), values
            keys, values = own if cache is None else cache.update(lambda: own)
        else:
            queries = self.queries(x, mask.rotary)
            if isinstance(memory, tuple):
                keys, values = memory
            else:
                project = partial(self.keys_and_values, grad_barrier(memory), mask.memory_rotary)
                keys, values = project() if cache is None else cache.update(project)
        return self.output(self.attend(queries, keys, values, mask, joined))

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, joined: Tensor | None = None
    ) -> Tensor:
        """The heads' values (batch, heads, queries, d_kv), by `attend` with this layer's settings."""
        if self.record is not None:
            self.record(attention_weights(queries, keys, mask.bias, mask.is_causal, self.scale, self.softcap))
        dropout = self.dropout_rate if self.training else 0.0
        return attend(queries, keys, values, mask.bias, mask.is_causal, self.scale, dropout, self.softcap, joined)

    def output(self, context: Tensor) -> Tensor:
        """(batch, queries, d_model) from the heads' values, (batch, heads, queries, d_kv)."""
        return self.o(context.transpose(1, 2).flatten(2))

    def queries(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """The queries (batch, heads, length, d_kv) of the states `x` (batch, length, d_model)."""
        return _with_positions(self._heads(self.q(x)), self.q_norm, rotary)

    def keys_and_values(self, source: Tensor, rotary: Rotary | None) -> KeysAndValues:
        """The keys and values of `source` (batch, length, width), each (batch, heads of keys, length, d_kv)."""
        keys, values = fused_linear(source, self.k, self.v, fused=self.fused)
        return self.of_products(keys, values, rotary)

    def of_products(self, keys: Tensor, values: Tensor, rotary: Rotary | None) -> KeysAndValues:
        """`keys_and_values` from the products with `k` and `v`, each (batch, length, inner)."""
        return _with_positions(self._heads(keys), self.k_norm, rotary), self._heads(values)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, inner) → (batch, heads, length, d_kv)."""
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)


def _with_positions(heads: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
    """Queries or keys (batch, heads, length, d_kv), normalised and then rotated to their positions."""
    heads = heads if norm is None else norm(heads)
    return heads if rotary is None else apply_rotary(heads, rotary)
