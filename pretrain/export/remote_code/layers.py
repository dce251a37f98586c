"""The layers of the exported models, and their attention masks."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable] = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}
GATES: dict[str, Callable] = {"swiglu": F.silu, "geglu": gelu_tanh}


class RootMeanSquareNorm(nn.Module):
    """RMSNorm in at least fp32. `around_one`: gains are 1 + weight."""

    def __init__(self, width, epsilon, around_one=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if around_one else torch.ones(width))
        self.epsilon, self.around_one = epsilon, around_one

    def forward(self, x):
        gains = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        gains = 1 + gains if self.around_one else gains
        return F.rms_norm(x.to(gains.dtype), gains.shape, gains, self.epsilon).to(x.dtype)


def new_norm(kind, width, epsilon, bias=False):
    """`kind`: "layer", "rms" or "rms_around_one"."""
    if kind == "layer":
        return nn.LayerNorm(width, epsilon, bias=bias)
    return RootMeanSquareNorm(width, epsilon, kind == "rms_around_one")


class FeedForward(nn.Module):
    wi: nn.Linear
    wi_0: nn.Linear
    wi_1: nn.Linear

    def __init__(self, d_model, d_ff, activation, bias=False, dropout_rate=0.0):
        super().__init__()
        self.gated = activation in GATES
        for name in ("wi_0", "wi_1") if self.gated else ("wi",):
            self.add_module(name, nn.Linear(d_model, d_ff, bias))
        self.wo = nn.Linear(d_ff, d_model, bias)
        self.activation = {**ACTIVATIONS, **GATES}[activation]
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x):
        hidden = self.activation(self.wi_0(x)) * self.wi_1(x) if self.gated else self.activation(self.wi(x))
        return self.wo(self.dropout(hidden))


class Attention(nn.Module):
    """Grouped-query attention. `heads`: d_model, num_heads and, if set, num_key_value_heads, head_dim and
    query_pre_attn_scalar. Logits stay within ± `softcap`.
    """

    def __init__(self, heads, memory_width=None, bias=False, dropout_rate=0.0, softcap=None, head_norm=None):
        super().__init__()
        d_model, num_heads = heads["d_model"], heads["num_heads"]
        width = self.width = heads.get("head_dim") or d_model // num_heads
        kv_heads = heads.get("num_key_value_heads") or num_heads
        self.groups, self.scale = num_heads // kv_heads, (heads.get("query_pre_attn_scalar") or width) ** -0.5
        self.dropout_rate, self.softcap = dropout_rate, softcap
        self.q = nn.Linear(d_model, num_heads * width, bias)
        self.k, self.v = (nn.Linear(memory_width or d_model, kv_heads * width, bias) for _ in range(2))
        self.o = nn.Linear(num_heads * width, d_model, bias)
        self.q_norm, self.k_norm = (head_norm(width) if head_norm else nn.Identity() for _ in range(2))

    def keys_and_values(self, x, rotary=None):
        """Keys and values (batch, heads, length, width of a head) of `x` (batch, length, width)."""
        return rotate(self.k_norm(self.heads(self.k(x))), rotary), self.heads(self.v(x))

    def forward(self, x, keys, values, mask, rotary=None):
        """`x` (batch, queries, d_model) attends to keys and values where `mask` (batch, 1, queries, keys) is True."""
        queries = rotate(self.q_norm(self.heads(self.q(x))), rotary)
        keys, values = (one.repeat_interleave(self.groups, dim=1) for one in (keys, values))
        dropout = self.dropout_rate if self.training else 0.0
        if self.softcap is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=self.scale
            )
        else:
            logits = self.softcap * torch.tanh(self.scale * queries @ keys.mT / self.softcap)
            out = F.dropout(logits.masked_fill(~mask, -torch.inf).softmax(dim=-1), dropout) @ values
        return self.o(out.transpose(1, 2).flatten(2))

    def heads(self, x):
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)


def rotary_embedding(positions, width, base, dtype, factor=1.0):
    """Cosines and sines (batch, 1, length, width / 2) of the angles, in fp32, at `positions` (batch, length), which are
    divided by `factor`."""
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions[:, None, :, None].float() * (frequencies / factor)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x, rotary):
    if rotary is None:
        return x
    (cosines, sines), (one, other) = rotary, x.chunk(2, dim=-1)
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines], dim=-1)


def real_positions(mask):
    """Positions (batch, length) that count from the first real token."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def visible(mask, queries, causal=False, window=None):
    """The attention mask (batch, 1, queries, keys) of the last `queries` tokens of `mask` (batch, keys): `causal`, and
    to keys less than `window` away. A query that would attend to no key, such as padding, attends to all."""
    keys = torch.arange(mask.size(1), device=mask.device)
    away = keys - keys[-queries:, None]
    seen = mask.bool()[:, None] & (away <= 0 if causal else torch.ones_like(away, dtype=torch.bool))
    if window is not None:
        seen = seen & (away.abs() < window)
    return (seen | ~seen.any(dim=-1, keepdim=True))[:, None]
