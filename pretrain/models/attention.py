"""Multi-head attention (Vaswani et al. 2017, section 3.2) with an additive bias and without bias vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.models.layers import Linear, one_use

# Finite, so that a row whose keys are all masked gives a mean of values and not NaN; exact zero after softmax.
MASKED = -1e9


class KeyValueCache:
    """The keys and values of one attention layer, each (batch, heads, length, d_kv), kept between decoding steps."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self.held[0].size(2) if self.held else 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions at the end; returns all keys and all values."""
        if self.held:
            keys, values = torch.cat([self.held[0], keys], dim=2), torch.cat([self.held[1], values], dim=2)
        self.held = keys, values
        return self.held


class Attention(nn.Module):
    """Self-attention, or cross-attention when `memory` is given.

    `scaled=False` is T5's: logits are not divided by √d_kv, the initialisation of `q` carries that factor instead.
    The four projections stay separate matrices: `q` has a scale of its own, which optimizers that measure a
    parameter's RMS (Adafactor, AdamWScale) must see.
    """

    def __init__(self, d_model: int, d_kv: int, num_heads: int, dropout_rate: float = 0.0, scaled: bool = False):
        super().__init__()
        inner = num_heads * d_kv
        self.d_kv = d_kv
        self.dropout_rate = dropout_rate
        self.scale = d_kv**-0.5 if scaled else 1.0
        self.q = Linear(d_model, inner, std=d_model**-0.5 if scaled else (d_model * d_kv) ** -0.5)
        self.k = Linear(d_model, inner, std=d_model**-0.5)
        self.v = Linear(d_model, inner, std=d_model**-0.5)
        self.o = Linear(inner, d_model, std=inner**-0.5)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to `memory` (batch, keys, d_model), by default to itself.

        `bias` is added to the attention logits and broadcasts to (batch, heads, queries, keys); masks are part of it.
        With a `cache`, self-attention also sees the cached positions, and cross-attention projects its memory once.
        """
        queries = self._heads(self.q(x))
        if memory is not None and cache is not None and cache.held:
            keys, values = cache.held
        else:
            source = x if memory is None else one_use(memory)
            keys, values = self._heads(self.k(source)), self._heads(self.v(source))
            if cache is not None:
                keys, values = cache.append(keys, values)
        dropout = self.dropout_rate if self.training else 0.0
        context = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, scale=self.scale
        )
        return self.o(context.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads · d_kv) to (batch, heads, length, d_kv)."""
        return x.unflatten(-1, (-1, self.d_kv)).transpose(1, 2)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """(queries, keys), True where the key is not in the query's future; the last query stands at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def padding_mask(mask: Tensor) -> Tensor:
    """(batch, keys), nonzero where a key is real, to a boolean (batch, 1, 1, keys) for every head and query."""
    return mask[:, None, None, :].bool()
