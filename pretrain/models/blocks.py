"""The layers of today's encoder-decoders: RMS norms, gated feed-forward layers, grouped heads and rotary positions.

Each sublayer's output may get a second norm before it is added to the residual stream: x + after(sublayer(before(x))).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.attention_masks import AttentionMask
from pretrain.models.config.blocks import Heads, Norm
from pretrain.models.layers import Dropout, FeedForward, GatedFeedForward, feed_forward, normalisation


@dataclass(frozen=True)
class Block:
    """What the layers of a stack have in common. Settings as in DecoderOnlyConfig; `scaled` as in `Attention`."""

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

    def new_norm(self) -> nn.Module:
        return normalisation(self.norm, self.heads.d_model, self.epsilon, self.biases)

    def new_norm_after(self) -> nn.Module:
        return self.new_norm() if self.norm_after else nn.Identity()

    def new_attention(self, memory_width: int | None = None, kind: type[Attention] = Attention) -> Attention:
        """`memory_width` as in `Attention`."""
        heads = self.heads
        return kind(
            heads.d_model,
            heads.d_kv,
            heads.num_heads,
            self.attention_dropout_rate,
            scaled=self.scaled,
            bias=self.biases,
            std=self.std,
            out_std=self.out_std,
            num_kv_heads=heads.kv_heads,
            memory_width=memory_width,
            scale=heads.attention_scalar**-0.5 if self.scaled else None,
            softcap=self.attention_softcap,
            head_norm=self._head_norm if self.qk_norm else None,
        )

    def _head_norm(self) -> nn.Module:
        return normalisation("rms" if self.norm == "layer" else self.norm, self.heads.d_kv, self.epsilon)

    def new_feed_forward(self) -> FeedForward | GatedFeedForward:
        heads, rate = self.heads, self.activation_dropout_rate
        stds = {"std": self.std, "out_std": self.out_std}
        return feed_forward(self.activation, heads.d_model, heads.d_ff, rate, bias=self.biases, **stds)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer; with a cache also a layer of a decoder without cross-attention."""

    def __init__(self, block: Block):
        super().__init__()
        self.self_attention_norm = block.new_norm()
        self.self_attention = block.new_attention()
        self.self_attention_norm_after = block.new_norm_after()
        self.feed_forward_norm = block.new_norm()
        self.feed_forward = block.new_feed_forward()
        self.feed_forward_norm_after = block.new_norm_after()
        self.dropout = Dropout(block.dropout_rate)

    def forward(self, x: Tensor, mask: AttentionMask, cache: KeyValueCache | None = None) -> Tensor:
        states = self.self_attention(self.self_attention_norm(x), mask=mask, cache=cache)
        x = x + self.dropout(self.self_attention_norm_after(states))
        states = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(self.feed_forward_norm_after(states))


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention to states of width `memory_width`, and a feed-forward layer."""

    def __init__(self, block: Block, memory_width: int):
        super().__init__()
        self.self_attention_norm = block.new_norm()
        self.self_attention = block.new_attention()
        self.self_attention_norm_after = block.new_norm_after()
        self.cross_attention_norm = block.new_norm()
        self.cross_attention = block.new_attention(memory_width)
        self.cross_attention_norm_after = block.new_norm_after()
        self.feed_forward_norm = block.new_norm()
        self.feed_forward = block.new_feed_forward()
        self.feed_forward_norm_after = block.new_norm_after()
        self.dropout = Dropout(block.dropout_rate)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        mask: AttentionMask,
        cross_mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        states = self.self_attention(self.self_attention_norm(x), mask=mask, cache=self_cache)
        x = x + self.dropout(self.self_attention_norm_after(states))
        states = self.cross_attention(self.cross_attention_norm(x), encoder_states, mask=cross_mask, cache=cross_cache)
        x = x + self.dropout(self.cross_attention_norm_after(states))
        states = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(self.feed_forward_norm_after(states))
