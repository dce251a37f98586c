"""T5Gemma 2: Zhang et al., "T5Gemma 2: Seeing, Reading, and Understanding Longer" (2025), its text part.

Gemma 3's layers, with norms of queries and keys and no soft caps. The decoder has one attention for both purposes: its
matrices make keys and values of the targets so far and of the encoder's states, and one softmax covers both. Only the
targets' keys and the queries have positions; only the targets are seen through windows. One matrix serves both
embeddings and the output.
"""

from torch import Tensor

from pretrain.config.models import T5Gemma2Config
from pretrain.models.attention import KeyValueCache
from pretrain.models.attention_masks import AttentionInputs, AttentionMask, positions_from
from pretrain.models.layers import Embedding
from pretrain.models.loss import Head
from pretrain.models.merged_attention import MergedAttention, merged_bias
from pretrain.models.positions import rotary_embedding
from pretrain.models.stacks import Caches, Encoder, EncoderDecoder, LayerConfig, ResidualLayer, Stack
from pretrain.models.t5gemma import layer_config
from pretrain.models.visibility import Window


def encoder_window(tokens: int) -> Window:
    """`tokens` keys, half of them on each side of a query; the last of an even number is after it."""
    return Window((tokens + 1) // 2 - 1, tokens // 2)


class MergedLayer(ResidualLayer):
    """Merged attention and a feed-forward layer."""

    self_attention: MergedAttention

    def __init__(self, settings: LayerConfig):
        attention = settings.new_attention(kind=MergedAttention)
        super().__init__(settings, self_attention=attention, feed_forward=settings.new_feed_forward())

    def forward(
        self,
        x: Tensor,
        states: Tensor,
        mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        x = self.add("self_attention", x, states, mask=mask, cache=cache)
        return self.add("feed_forward", x)


class MergedDecoder(Stack):
    """Layers with merged attention."""

    def __init__(self, config: T5Gemma2Config):
        layer = layer_config(config, config)
        super().__init__(config, layer, (MergedLayer(layer) for _ in range(config.num_layers)))

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, past_length = x.size(1), cache[0][0].length if cache else 0
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        x = self.add_positions(x, positions)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            bias = merged_bias(x, keys, encoder_states.size(1), window, inputs)
            return AttentionMask(bias, rotary_embedding(positions, self.d_kv, x.dtype, base))

        masks = self.layer_masks.for_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, masks[i], cache[i] if cache else None)
        return self.finished(x, positions)


class T5Gemma2(EncoderDecoder):
    """The text part of T5Gemma 2."""

    config: T5Gemma2Config

    def __init__(self, config: T5Gemma2Config):
        rows, std = config.padded_vocab_size, config.init_std
        super().__init__(
            config,
            Embedding(rows, config.d_model, std),
            Encoder(config, layer_config(config, config), config.num_layers, encoder_window),
            MergedDecoder(config),
            Head(config.d_model, rows, std, multiplier=config.logits_multiplier),
            tied=True,
        )
