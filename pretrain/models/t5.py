"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without any bias vector, with relative positions. Version 1.0 has ReLU layers and one
matrix for embedding and output; version 1.1 has gated GELU layers and an output matrix of its own. Other kinds of
positions are options that T5 didn't have.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.config.t5 import T5Config
from pretrain.models.encoder_decoder import Caches, EncoderDecoder, bias_of_cross_attention
from pretrain.models.layers import FEED_FORWARDS, Dropout, Embedding, RMSNorm
from pretrain.models.logit_bias import Pattern, logit_bias
from pretrain.models.loss_head import Head
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    RelativePositionBias,
    Rotation,
    positions_from,
    rotation,
    sinusoids,
)


def _attention(config: T5Config) -> Attention:
    return Attention(config.d_model, config.d_kv, config.num_heads, config.dropout_rate)


def _feed_forward(config: T5Config) -> nn.Module:
    return FEED_FORWARDS[config.feed_forward](config.d_model, config.d_ff, config.dropout_rate)


def _norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.d_model, config.layer_norm_epsilon)


def _relative_attention_bias(config: T5Config, bidirectional: bool) -> RelativePositionBias:
    return RelativePositionBias(
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
        config.num_heads,
        bidirectional,
        std=config.base_width**-0.5,
    )


def _output_std(config: T5Config) -> float:
    return config.init_output_std * (1.0 if config.scale_outputs else config.base_width**-0.5)


def _embedding_std(config: T5Config) -> float:
    return _output_std(config) if config.tie_embeddings else 1.0


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention_norm = _norm(config)
        self.self_attention = _attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = _feed_forward(config)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, bias: Tensor | Pattern | None, rotation: Rotation | None = None) -> Tensor:
        x = x + self.dropout(self.self_attention(self.self_attention_norm(x), bias=bias, rotation=rotation))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention_norm = _norm(config)
        self.self_attention = _attention(config)
        self.cross_attention_norm = _norm(config)
        self.cross_attention = _attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = _feed_forward(config)
        self.dropout = Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        bias: Tensor | Pattern | None,
        cross_bias: Tensor | Pattern | None,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        x = x + self.dropout(
            self.self_attention(self.self_attention_norm(x), bias=bias, cache=self_cache, rotation=rotation)
        )
        x = x + self.dropout(
            self.cross_attention(self.cross_attention_norm(x), encoder_states, bias=cross_bias, cache=cross_cache)
        )
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stack(nn.Module):
    """Dropout, the layers, a final norm, dropout; positions as in `config`.

    The stack owns the relative positions: their bias is computed once and added in each layer.
    """

    def __init__(self, config: T5Config, layers: Iterable[nn.Module], bidirectional: bool):
        super().__init__()
        self.positions, self.d_kv = config.positions, config.d_kv
        if config.positions == "relative":
            self.relative_attention_bias = _relative_attention_bias(config, bidirectional)
        elif config.positions == "alibi":
            self.linear_bias = LinearBias(config.num_heads, bidirectional)
        elif config.positions == "learned":
            assert config.max_positions is not None
            self.learned_positions = LearnedPositions(config.max_positions, config.d_model, _embedding_std(config))
        self.layers = nn.ModuleList(layers)
        self.final_norm = _norm(config)
        self.dropout = Dropout(config.dropout_rate)

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of self-attention logits, for the last `queries` of `keys`, as in `Pattern`."""
        if self.positions == "relative":
            return self.relative_attention_bias(queries, keys)
        return self.linear_bias(queries, keys, x.device, x.dtype) if self.positions == "alibi" else None

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds the vectors of `positions` (length,) or (batch, length) to embeddings (batch, length, d_model)."""
        if self.positions == "sinusoidal":
            return x + sinusoids(positions, x.size(-1), x.dtype)
        return x + self.learned_positions(positions) if self.positions == "learned" else x

    def rotation(self, positions: Tensor, x: Tensor) -> Rotation | None:
        return rotation(positions, self.d_kv, x.dtype) if self.positions == "rotary" else None


class Encoder(Stack):
    def __init__(self, config: T5Config):
        layers = (EncoderLayer(config) for _ in range(config.num_encoder_layers))
        super().__init__(config, layers, bidirectional=True)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape."""
        length = x.size(1)
        positions = positions_from(0, length, x.device, positions)
        diagonals = self.diagonals(length, length, x)
        bias = logit_bias(x, length, diagonals, key_mask=attention_mask, query_segments=segments, key_segments=segments)
        turned = self.rotation(positions, x)
        x = self.dropout(self.placed(x, positions))
        for layer in self.layers:
            x = layer(x, bias, turned)
        return self.dropout(self.final_norm(x))


class Decoder(Stack):
    """Self-attention is causal and has positions of its own; cross-attention has none."""

    def __init__(self, config: T5Config):
        layers = (DecoderLayer(config) for _ in range(config.num_decoder_layers))
        super().__init__(config, layers, bidirectional=False)

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
        queries = x.size(1)
        held = cache[0][0].length if cache else 0
        keys = held + queries
        positions = positions_from(held, queries, x.device, positions)
        diagonals = self.diagonals(queries, keys, x)
        bias = logit_bias(x, keys, diagonals, causal=True, query_segments=segments, key_segments=segments)
        cross_bias = bias_of_cross_attention(x, encoder_states, encoder_attention_mask, segments, encoder_segments)
        turned = self.rotation(positions, x)
        x = self.dropout(self.placed(x, positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, bias, cross_bias, cache[i] if cache else None, turned)
        return self.dropout(self.final_norm(x))


class T5(EncoderDecoder):
    """T5 with any of the positions of `T5Config`."""

    config: T5Config

    def __init__(self, config: T5Config):
        rows, d_model = config.padded_vocab_size, config.d_model
        super().__init__(
            config,
            Embedding(rows, d_model, _embedding_std(config)),
            Encoder(config),
            Decoder(config),
            Head(d_model, rows, std=_output_std(config), multiplier=config.logits_multiplier),
            config.tie_embeddings,
        )

    def before_head(self, x: Tensor) -> Tensor:
        return x * self.config.d_model**-0.5 if self.config.scale_outputs else x
