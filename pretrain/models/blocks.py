"""The layers of all families: sublayers of a residual stream, with the norms, heads and activations of a `Block`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pretrain.config.models import Heads, Norm
from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.attention_masks import AttentionMask
from pretrain.models.layers import Dropout, FeedForward, normalisation


@dataclass(frozen=True)
class Block:
    """What the layers of a stack have in common. Settings as in DecoderOnlyConfig; `scaled` as in `Attention`.

    `post_norm`: norms come after a sublayer's output is added, as in Vaswani et al. (2017). `feed_forward_std`: that of
    feed-forward layers; None: `std`.
    """

    heads: Heads
    activation: str
    norm: Norm
    epsilon: float
    norm_after: bool = False
    qk_norm: bool = False
    biases: bool = False
    attention_softcap: float | None = None
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    activation_dropout_rate: float = 0.0
    std: float | None = None
    out_std: float | None = None
    scaled: bool = True
    post_norm: bool = False
    feed_forward_std: float | None = None

    def new_norm(self) -> nn.Module:
        return normalisation(self.norm, self.heads.d_model, self.epsilon, self.biases)

    def new_attention(self, memory_width: int | None = None, kind: type[Attention] = Attention) -> Attention:
        """`memory_width` as in `Attention`."""
        return kind(
            self.heads,
            self.attention_dropout_rate,
            scaled=self.scaled,
            bias=self.biases,
            std=self.std,
            out_std=self.out_std,
            memory_width=memory_width,
            softcap=self.attention_softcap,
            head_norm=self._head_norm if self.qk_norm else None,
        )

    def _head_norm(self) -> nn.Module:
        return normalisation("rms" if self.norm == "layer" else self.norm, self.heads.d_kv, self.epsilon)

    def new_feed_forward(self) -> FeedForward:
        return FeedForward(
            self.heads.d_model,
            self.heads.d_ff,
            self.activation_dropout_rate,
            self.activation,
            bias=self.biases,
            std=self.feed_forward_std or self.std,
            out_std=self.out_std,
        )


class Layer(nn.Module):
    """Sublayers by name, each with its norms: x + after(sublayer(before(x))), or post-norm, norm(x + sublayer(x))."""

    def __init__(self, block: Block, **sublayers: nn.Module):
        super().__init__()
        self.post_norm = block.post_norm
        for name, sublayer in sublayers.items():
            if self.post_norm:
                self.add_module(name, sublayer)
            self.add_module(f"{name}_norm", block.new_norm())
            if not self.post_norm:
                self.add_module(name, sublayer)
                self.add_module(f"{name}_norm_after", block.new_norm() if block.norm_after else nn.Identity())
        self.dropout = Dropout(block.dropout_rate)

    def add(self, name: str, x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """`x` (batch, length, d_model) and what the sublayer `name` adds to it."""
        sublayer, norm = getattr(self, name), getattr(self, f"{name}_norm")
        if self.post_norm:
            return norm(x + self.dropout(sublayer(x, *inputs, **options)))
        after = getattr(self, f"{name}_norm_after")
        return x + self.dropout(after(sublayer(norm(x), *inputs, **options)))


class EncoderLayer(Layer):
    """Self-attention and a feed-forward layer; with a cache also a layer of a decoder without cross-attention.

    `name`: that of the attention.
    """

    def __init__(self, block: Block, name: str = "self_attention"):
        super().__init__(block, **{name: block.new_attention(), "feed_forward": block.new_feed_forward()})
        self.attention_name = name

    def forward(self, x: Tensor, mask: AttentionMask, cache: KeyValueCache | None = None) -> Tensor:
        x = self.add(self.attention_name, x, mask=mask, cache=cache)
        return self.add("feed_forward", x)


class DecoderLayer(Layer):
    """Self-attention, cross-attention to states of width `memory_width`, and a feed-forward layer."""

    def __init__(self, block: Block, memory_width: int | None = None):
        super().__init__(
            block,
            self_attention=block.new_attention(),
            cross_attention=block.new_attention(memory_width),
            feed_forward=block.new_feed_forward(),
        )

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        mask: AttentionMask,
        cross_mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        x = self.add("self_attention", x, mask=mask, cache=self_cache)
        x = self.add("cross_attention", x, encoder_states, mask=cross_mask, cache=cross_cache)
        return self.add("feed_forward", x)
