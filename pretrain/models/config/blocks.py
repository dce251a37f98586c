"""Settings that families with today's layers share: heads, windows and rotations."""

from typing import Literal, NamedTuple, Self

from pydantic import PositiveFloat, model_validator

from data_pipeline.foundation.config_file import Section
from pretrain.models.config.base import Count

Norm = Literal["layer", "rms", "rms_around_one"]


class Heads(Section):
    """The widths of a layer, with as many heads of keys and values as of queries, or fewer (Ainslie et al. 2023)."""

    d_model: Count
    """Width of the embeddings and of every sublayer's output."""
    d_ff: Count
    """Width of the feed-forward layers."""
    num_heads: Count
    """Attention heads of a layer."""
    num_key_value_heads: Count | None = None
    """Heads of keys and values, each for a group of `num_heads` / this many heads of queries. null: `num_heads`."""
    head_dim: Count | None = None
    """Width of a head. null: d_model / num_heads."""
    query_pre_attn_scalar: Count | None = None
    """Attention logits are divided by the square root of this. null: the width of a head."""

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_heads

    @property
    def attention_scalar(self) -> int:
        """Attention logits are divided by the square root of this."""
        return self.query_pre_attn_scalar or self.d_kv

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}; set head_dim")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_key_value_heads: {self.kv_heads} doesn't divide num_heads {self.num_heads}")
        return self


class Kind(NamedTuple):
    """What the self-attention of a layer sees, and the base of its rotations."""

    window: int | None
    rope_base: float


class LocalAndGlobal(Section):
    """Which layers see the whole row and which a window of it, each with rotary positions (Gemma 2 and 3)."""

    sliding_window: Count | None = None
    """Tokens that a layer with a window sees: the query's own and those before it. null: no layer has a window."""
    full_attention_every: Count | None = None
    """Every n-th layer sees the whole row, and the others a window. null: all have the window, if there is one."""
    rope_base: PositiveFloat = 10_000.0
    """Base of the frequencies of rotary positions."""
    window_rope_base: PositiveFloat | None = None
    """The base in layers with a window. null: `rope_base`."""

    def sees_all(self, layer: int) -> bool:
        """Whether a layer, counted from 0, sees the whole row."""
        every = self.full_attention_every
        return self.sliding_window is None or (every is not None and (layer + 1) % every == 0)

    def kind(self, layer: int) -> Kind:
        """What a layer, counted from 0, sees."""
        if self.sees_all(layer):
            return Kind(None, self.rope_base)
        return Kind(self.sliding_window, self.window_rope_base or self.rope_base)

    @model_validator(mode="after")
    def _windows_are_whole(self) -> Self:
        if self.sliding_window is None:
            for name in ("full_attention_every", "window_rope_base"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: needs a sliding_window")
        return self
