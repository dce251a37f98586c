"""Multi-head attention (Vaswani et al. 2017, section 3.2) with an additive bias, and its key-value caches.

Options of later models: fewer heads of keys and values (Ainslie et al. 2023), norms of queries and keys, soft caps.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from pretrain.config.models import Heads
from pretrain.functional.attention import attend
from pretrain.models.attention_masks import AttentionMask
from pretrain.models.layers import Linear, fused_linear, one_use
from pretrain.models.positions import Rotary, apply_rotary

KeysAndValues = tuple[Tensor, Tensor]


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

    Several consecutive heads of queries share a head of keys and values, if there are fewer of these. The four
    projections stay separate matrices because `q` has a scale of its own: optimizers that measure a parameter's RMS
    (Adafactor, AdamWScale) must see it. `fused`: `fused_linear` may multiply by them at once. `merged`: keys and values
    of `memory` are made by the same matrices as the queries' own.

    - `scaled`: logits are divided by √d_kv; otherwise the initialisation of `q` carries that factor.
    - `std` initialises all four projections, and `out_std` overrides it for `o`. None: from the fan-in.
    - `memory_width`: the width of `memory`; None: d_model.
    - `softcap`: logits stay within ± this.
    - `head_norm`: makes the norm of each head's queries, and that of its keys, which come before rotation.
    """

    merged: ClassVar[bool] = False

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
