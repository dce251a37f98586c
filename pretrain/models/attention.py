"""Multi-head attention (Vaswani et al. 2017, section 3.2) with an additive bias, and its key-value caches."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.kernels.products import product
from pretrain.models.layers import Linear, drop, one_use, products
from pretrain.models.logit_bias import LONGEST_HEAD, Pattern
from pretrain.models.masks import MASKED
from pretrain.models.positions import Rotation, rotate

KeysAndValues = tuple[Tensor, Tensor]
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class KeyValueCache:
    """Keys and values of one attention layer, each (batch, heads, length, d_kv). Each decoding step appends to them."""

    def __init__(self) -> None:
        self.held: KeysAndValues | None = None

    @property
    def length(self) -> int:
        return self.held[0].size(2) if self.held else 0

    def update(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Appends the keys and values that `project` computes; returns all of them."""
        new = project()
        if self.held:
            new = torch.cat([self.held[0], new[0]], dim=2), torch.cat([self.held[1], new[1]], dim=2)
        self.held = new
        return new

    def select(self, rows: Tensor) -> None:
        """Keeps only these `rows` (n,) of the batch, in this order; beam search reorders hypotheses this way."""
        if self.held:
            self.held = self.held[0].index_select(0, rows), self.held[1].index_select(0, rows)


class MemoryCache(KeyValueCache):
    """Keys and values of an encoder's output, projected once."""

    def update(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        if self.held is None:
            self.held = project()
        return self.held


class Attention(nn.Module):
    """Self-attention, or cross-attention when `memory` is given.

    `scaled=False` is T5's form: logits are not divided by √d_kv; the initialisation of `q` carries that factor instead.
    `std` initialises all four projections, and `out_std` overrides it for `o`. None: T5's values, from the fan-in.
    The four projections stay separate matrices because `q` has a scale of its own: optimizers that measure a
    parameter's RMS (Adafactor, AdamWScale) must see it. `joined`: `products` may multiply by them at once.
    """

    def __init__(
        self,
        d_model: int,
        d_kv: int,
        num_heads: int,
        dropout_rate: float = 0.0,
        *,
        scaled: bool = False,
        bias: bool = False,
        std: float | None = None,
        out_std: float | None = None,
    ):
        super().__init__()
        inner = num_heads * d_kv
        self.d_kv = d_kv
        self.joined = False
        self.dropout_rate = dropout_rate
        self.scale = d_kv**-0.5 if scaled else 1.0
        self.q = Linear(d_model, inner, std or (d_model**-0.5 if scaled else (d_model * d_kv) ** -0.5), bias)
        self.k = Linear(d_model, inner, std or d_model**-0.5, bias)
        self.v = Linear(d_model, inner, std or d_model**-0.5, bias)
        self.o = Linear(inner, d_model, out_std or std or inner**-0.5, bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        bias: Tensor | Pattern | None = None,
        cache: KeyValueCache | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
        memory_rotation: Rotation | None = None,
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to `memory` (batch, keys, d_model), by default to itself.

        `bias` is added to the attention logits, includes all masks, and broadcasts to (batch, heads, queries, keys).
        `causal` instead of a bias lets the fastest kernels run. With a `cache`, `x` and `memory` hold new tokens only.
        `rotation` is for the positions of `x`, `memory_rotation` for those of `memory`.
        """
        x = one_use(x)
        dropout = self.dropout_rate if self.training else 0.0
        if memory is None and cache is None:
            queries, keys, values = self._projected(x, self.q, self.k, self.v)
            if rotation is not None:
                queries, keys = rotate(queries, rotation), rotate(keys, rotation)
            return self._merged(attend(queries, keys, values, bias, causal, self.scale, dropout))
        (queries,) = self._projected(x, self.q)
        if rotation is not None:
            queries = rotate(queries, rotation)

        def project() -> KeysAndValues:
            source = x if memory is None else one_use(memory)
            keys, values = self._projected(source, self.k, self.v)
            turned = rotation if memory is None else memory_rotation
            return (keys if turned is None else rotate(keys, turned)), values

        keys, values = project() if cache is None else cache.update(project)
        return self._merged(attend(queries, keys, values, bias, causal, self.scale, dropout))

    def _projected(self, x: Tensor, *matrices: Linear) -> list[Tensor]:
        """What each of `matrices` makes of (batch, length, d_model): (batch, heads, length, d_kv)."""
        found = products(x, *matrices, joined=self.joined)
        return [one.unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for one in found]

    def _merged(self, context: Tensor) -> Tensor:
        """(batch, heads, length, d_kv) to (batch, length, d_model)."""
        return self.o(context.transpose(1, 2).flatten(2))


_noted: list[Tensor] | None = None  # where `attend` leaves its weights


@contextlib.contextmanager
def noting_weights() -> Iterator[list[Tensor]]:
    """Within the block, each call of `attend` appends its weights (batch, heads, queries, keys), for pictures of them.

    The fast kernels never hold these weights, so they are computed apart.
    """
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | Pattern | None,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale · queries · keysᵀ + bias) · values, each (batch, heads, length, d_kv); `bias` excludes `causal`.

    On a GPU a `Pattern` goes to a kernel that needs no matrix of queries × keys. On a CPU, PyTorch's own kernels take
    up to three times as long as the two products written out in bf16, and longer in fp32 with dropout or a bias that
    learns. The softmax is in fp32 in all forms.
    """
    if isinstance(bias, Pattern):
        if queries.size(3) <= LONGEST_HEAD and _noted is None:
            return flash(queries, keys, values, bias, scale, dropout)
        bias = bias.matrix(queries.size(2), keys.size(2), queries.dtype, queries.device)
    if _noted is not None:
        _noted.append(_softmax(queries, keys, _future(queries, keys, 0) if causal else bias, scale).detach())
    learned = bias is not None and bias.requires_grad
    slow = queries.device.type == "cpu" and (queries.dtype == torch.bfloat16 or dropout > 0 or learned)
    form = written_out if slow else fused
    return form(queries, keys, values, bias, causal, scale, dropout)


def flash(queries: Tensor, keys: Tensor, values: Tensor, pattern: Pattern, scale: float, dropout: float) -> Tensor:
    """`attend` by this project's kernel. A query that sees nothing gives 0, where the others give a mean of values."""
    from pretrain.kernels.attention import flash_attention  # imports Triton, which only GPUs need

    diagonals, seen, causal = pattern.diagonals, pattern.labels, pattern.causal
    return flash_attention(queries, keys, values, diagonals, seen, causal, scale, dropout)


def fused(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """`attend` by PyTorch's kernels."""
    with kernels(queries.device, masked=bias is not None):
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
        )


def kernels(device: torch.device, masked: bool) -> AbstractContextManager[None]:
    """Within the block, PyTorch chooses among those of its kernels that are right on `device`.

    With a mask, cuDNN's may give a NaN gradient on H100 and H200 (PyTorch issue 196678): where all keys of a query are
    masked and the length, divided by 128, leaves 64.
    """
    return sdpa_kernel(_WITHOUT_CUDNN) if masked and device.type == "cuda" else nullcontext()


def written_out(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """`attend` as two products with a softmax between them, which keep (batch, heads, queries, keys) in memory.

    Where it is causal, some queries at a time: only with the keys up to the last of them.
    """
    if not causal:
        return _written_out(queries, keys, values, bias, scale, dropout)
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    found = []
    for first in range(0, queries.size(2), _QUERIES):
        some, seen = queries[:, :, first : first + _QUERIES], slice(first + _QUERIES)
        earlier, their_values = keys[:, :, seen], values[:, :, seen]
        found.append(_written_out(some, earlier, their_values, _future(some, earlier, first), scale, dropout))
    return torch.cat(found, dim=2)


_QUERIES = 128  # at a time: a quarter of 512 queries leaves out three eighths of the work


def _written_out(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    return product(drop(_softmax(queries, keys, bias, scale), dropout), values)


def _softmax(queries: Tensor, keys: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The weights of attention (batch, heads, queries, keys)."""
    logits = product(queries if scale == 1.0 else queries * scale, keys.mT)
    return torch.softmax(logits if bias is None else logits + bias, dim=-1)


def _future(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """(queries, keys) The bias that hides later keys from queries, of which the first stands at `first`."""
    return queries.new_full((queries.size(2), keys.size(2)), MASKED).triu(first + 1)
