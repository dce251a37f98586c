"""The vanilla Transformer: Vaswani et al., "Attention Is All You Need" (2017).

A post-norm encoder-decoder, LayerNorm(x + Dropout(Sublayer(x))), with sinusoidal positions and one matrix for both
embeddings and the output. Its layers and stacks are BART's too.
"""

import math

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.attention_masks import (
    AttentionInputs,
    AttentionMask,
    cross_attention_mask,
    self_attention_mask,
)
from pretrain.models.config.vanilla import PostNormConfig, VanillaConfig
from pretrain.models.encoder_decoder import Caches, EncoderDecoder, length_of
from pretrain.models.layers import Dropout, Embedding, FeedForward, LayerNorm
from pretrain.models.logit_bias import logit_bias
from pretrain.models.loss_head import Head
from pretrain.models.positions import positions_from, sinusoids


def _attention(config: PostNormConfig, std: float | None) -> Attention:
    return Attention(
        config.d_model,
        config.d_kv,
        config.num_heads,
        config.attention_dropout_rate,
        scaled=True,
        bias=True,
        std=std or config.d_model**-0.5,
    )


def _feed_forward(config: PostNormConfig, std: float | None) -> FeedForward:
    return FeedForward(
        config.d_model,
        config.d_ff,
        config.activation_dropout_rate,
        config.activation,
        bias=True,
        std=std or (2 / (config.d_model + config.d_ff)) ** 0.5,
    )


class EncoderLayer(nn.Module):
    """`std` initialises all matrices; None: Glorot's √(2 / (inputs + outputs)), as in the authors' code."""

    def __init__(self, config: PostNormConfig, std: float | None):
        super().__init__()
        self.self_attention = _attention(config, std)
        self.self_attention_norm = LayerNorm(config.d_model)
        self.feed_forward = _feed_forward(config, std)
        self.feed_forward_norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, mask: AttentionMask) -> Tensor:
        x = self.self_attention_norm(x + self.dropout(self.self_attention(x, mask=mask)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    """`std` as in `EncoderLayer`."""

    def __init__(self, config: PostNormConfig, std: float | None):
        super().__init__()
        self.self_attention = _attention(config, std)
        self.self_attention_norm = LayerNorm(config.d_model)
        self.cross_attention = _attention(config, std)
        self.cross_attention_norm = LayerNorm(config.d_model)
        self.feed_forward = _feed_forward(config, std)
        self.feed_forward_norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        mask: AttentionMask,
        cross_mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        attended = self.self_attention(x, mask=mask, cache=self_cache)
        x = self.self_attention_norm(x + self.dropout(attended))
        attended = self.cross_attention(x, encoder_states, mask=cross_mask, cache=cross_cache)
        x = self.cross_attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Encoder(nn.Module):
    """`inputs` maps token vectors (batch, length, d_model) and positions to the input of the first layer."""

    def __init__(self, config: PostNormConfig, inputs: nn.Module, std: float | None):
        super().__init__()
        self.inputs = inputs
        self.layers = nn.ModuleList(EncoderLayer(config, std) for _ in range(config.num_encoder_layers))

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape."""
        length = x.size(1)
        mask = self_attention_mask(
            x,
            length,
            causal=False,
            key_mask=inputs.encoder_attention_mask,
            segments=inputs.encoder_segment_ids,
        )
        x = self.inputs(x, positions_from(0, length, x.device, inputs.encoder_positions))
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Decoder(nn.Module):
    """`inputs` as in `Encoder`."""

    def __init__(self, config: PostNormConfig, inputs: nn.Module, std: float | None):
        super().__init__()
        self.inputs = inputs
        self.layers = nn.ModuleList(DecoderLayer(config, std) for _ in range(config.num_decoder_layers))

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it.

        Without cache and segments, the kernel's causal flag replaces the mask.
        """
        past_length, queries, segments = length_of(cache), x.size(1), inputs.decoder_segment_ids
        causal = not past_length and segments is None
        bias = logit_bias(x, past_length + queries, causal=not causal, query_segments=segments, key_segments=segments)
        mask, cross_mask = AttentionMask(bias, is_causal=causal), cross_attention_mask(x, encoder_states, inputs)
        x = self.inputs(x, positions_from(past_length, queries, x.device, inputs.decoder_positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, mask, cross_mask, cache[i] if cache else None)
        return x


class SinusoidalInputs(nn.Module):
    """Token vectors times √d_model, with muP that of the base width, plus sinusoids (sections 3.4 and 3.5)."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        self.scale = math.sqrt(config.base_width)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(x * self.scale + sinusoids(positions, x.size(-1), x.dtype))


class Vanilla(EncoderDecoder):
    """The Transformer as published."""

    def __init__(self, config: VanillaConfig):
        rows, d_model, std = config.padded_vocab_size, config.d_model, config.init_output_std * config.base_width**-0.5
        embedding = Embedding(rows, d_model, std)
        lm_head = Head(d_model, rows, std, multiplier=config.logits_multiplier)
        encoder, decoder = (stack(config, SinusoidalInputs(config), std=None) for stack in (Encoder, Decoder))
        super().__init__(config, embedding, encoder, decoder, lm_head, tied=True)
