"""T5Gemma 2: Zhang et al., "T5Gemma 2: Seeing, Reading, and Understanding Longer" (2025), its text part.

Gemma 3's layers, with norms of queries and keys and no soft caps. The decoder has one attention for both purposes: its
matrices make keys and values of the targets so far and of the encoder's states, and one softmax covers both. Only the
targets' keys and the queries have positions; only the targets are seen through windows. One matrix serves both
embeddings and the output.
"""

from typing import cast

import torch
from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache, attend
from pretrain.models.attention_masks import Sight, before_only
from pretrain.models.blocks import Block
from pretrain.models.config.t5gemma import T5Gemma2Config
from pretrain.models.encoder_decoder import Caches, EncoderDecoder
from pretrain.models.layers import Dropout, Embedding, one_use
from pretrain.models.loss_head import Head
from pretrain.models.masks import Window, masked, seen
from pretrain.models.model import Sizes, matrix_weights
from pretrain.models.positions import Rotation, positions_from, rotation
from pretrain.models.stacks import Encoder, Stack


def _block(config: T5Gemma2Config) -> Block:
    return Block(
        config,
        "geglu",
        "rms_around_one",
        config.layer_norm_epsilon,
        norm_after=True,
        qk_norm=True,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        activation_dropout_rate=config.dropout_rate,
        std=config.hidden_std(config.init_std),
    )


def around(tokens: int) -> Window:
    """The encoder's window, `tokens` wide: half of them on each side, where the last of an even number is after."""
    return Window((tokens + 1) // 2 - 1, tokens // 2)


class MergedAttention(Attention):
    """Attention to the targets so far and to the encoder's states at once."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        states: Tensor,
        bias: Tensor,
        rotation: Rotation | None = None,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
        rotation_of_states: Rotation | None = None,
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to itself and to `states` (batch, inputs, d_model).

        `bias` broadcasts to (batch, heads, queries, targets + inputs). With a cache, `x` holds new tokens only.
        """
        x, states = one_use(x), one_use(states)
        queries = self.queries(x, rotation)

        def own() -> tuple[Tensor, Tensor]:
            return self.keys_and_values(x, rotation)

        def others() -> tuple[Tensor, Tensor]:
            return self.keys_and_values(states, rotation_of_states)

        keys, values = own() if cache is None else cache[0].update(own)
        of_states, values_of_states = others() if cache is None else cache[1].update(others)
        keys, values = torch.cat([keys, of_states], dim=2), torch.cat([values, values_of_states], dim=2)
        dropout = self.dropout_rate if self.training else 0.0
        return self.output(attend(queries, keys, values, bias, False, self.scale, dropout, self.softcap))


class DecoderLayer(nn.Module):
    """Merged attention and a feed-forward layer."""

    def __init__(self, block: Block):
        super().__init__()
        self.self_attention_norm = block.new_norm()
        self.self_attention = block.new_attention(kind=MergedAttention)
        self.self_attention_norm_after = block.new_norm_after()
        self.feed_forward_norm = block.new_norm()
        self.feed_forward = block.new_feed_forward()
        self.feed_forward_norm_after = block.new_norm_after()
        self.dropout = Dropout(block.dropout_rate)

    def forward(
        self, x: Tensor, states: Tensor, sight: Sight, cache: tuple[KeyValueCache, KeyValueCache] | None = None
    ) -> Tensor:
        attended = self.self_attention(
            self.self_attention_norm(x), states, sight.bias, sight.rotation, cache, sight.memory_rotation
        )
        x = x + self.dropout(self.self_attention_norm_after(attended))
        after = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(self.feed_forward_norm_after(after))


class Decoder(Stack):
    """Layers with merged attention."""

    def __init__(self, config: T5Gemma2Config):
        block = _block(config)
        layers: list[nn.Module] = [DecoderLayer(block) for _ in range(config.num_layers)]
        super().__init__(config, block, layers, before_only, scale_embedding=True)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: Caches | None = None,
        segments: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, held = x.size(1), cache[0][0].length if cache else 0
        positions = positions_from(held, queries, x.device, positions)
        x = self.placed(x, positions)

        def see(window: Window | None, base: float) -> Sight:
            bias = merged_bias(
                x, held + queries, encoder_states.size(1), window, encoder_attention_mask, segments, encoder_segments
            )
            return Sight(bias, rotation(positions, self.d_kv, x.dtype, base))

        sights = self.sights.of_layers(see, queries, held + queries)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, sights[i], cache[i] if cache else None)
        return self.dropout(self.final_norm(x))


def merged_bias(
    x: Tensor,
    targets: int,
    inputs: int,
    window: Window | None,
    input_mask: Tensor | None,
    segments: Tensor | None,
    input_segments: Tensor | None,
) -> Tensor:
    """(1 or batch, 1, queries, targets + inputs) The bias of merged attention, for `x` (batch, queries, d_model).

    A query always sees its own token, so one without any input sees no padding instead.
    """
    queries, device = x.size(1), x.device
    own = seen(queries, targets, device, causal=True, window=window, query_segments=segments, key_segments=segments)
    others = seen(queries, inputs, device, key_mask=input_mask, query_segments=segments, key_segments=input_segments)
    assert own is not None
    rows = own.size(0) if others is None else max(own.size(0), others.size(0))
    if others is None:
        others = own.new_ones(1, 1, 1, 1)
    both = own.expand(rows, 1, queries, targets), others.expand(rows, 1, queries, inputs)
    bias = masked(None, torch.cat(both, dim=-1), x.dtype)
    assert bias is not None
    return bias


class T5Gemma2(EncoderDecoder):
    """The text part of T5Gemma 2."""

    config: T5Gemma2Config

    def __init__(self, config: T5Gemma2Config):
        rows, std = config.padded_vocab_size, config.init_std
        super().__init__(
            config,
            Embedding(rows, config.d_model, std),
            Encoder(config, _block(config), config.num_layers, around, scale_embedding=True),
            Decoder(config),
            Head(config.d_model, rows, std, multiplier=config.logits_multiplier),
            tied=True,
        )

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """As in other encoder-decoders; the decoder's keys and values of inputs count as cross-attention."""
        parts = super().flops_by_part(sizes)
        attention = cast(Attention, cast(Decoder, self.decoder).layers[0].self_attention)
        of_keys = matrix_weights(attention.k) + matrix_weights(attention.v)
        across = 6.0 * of_keys * sizes.inputs + 12.0 * attention.width * sizes.cross_pairs
        return {**parts, "cross-attention": self.config.num_layers * across}
