"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without any bias vector, with relative positions. Version 1.0 has ReLU layers and one
matrix for embedding and output; version 1.1 has gated GELU layers and an output matrix of its own. Other kinds of
positions are options that T5 didn't have.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache, MemoryCache
from pretrain.models.config import T5Config
from pretrain.models.layers import FEED_FORWARDS, Embedding, Linear, RMSNorm
from pretrain.models.loss import Losses, configured_losses, shift_right
from pretrain.models.masks import masked, visible
from pretrain.models.model import Model, Sizes, attention_flops, cross_attentions, matrix_weights
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    RelativePositionBias,
    Rotation,
    positions_from,
    rotation,
    sinusoids,
)

# The standard deviation of the first logits. At 1, T5's own value, the first loss is ln V + 1/2 (the mean of
# log Z for unit normal logits), and tied embeddings start out predicting their own input; at 1/2 it is ln V + 1/8.
OUTPUT_STD = 0.5


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
        std=config.d_model**-0.5,
    )


def _output_std(config: T5Config) -> float:
    return OUTPUT_STD if config.scale_outputs else OUTPUT_STD * config.d_model**-0.5


def _embedding_std(config: T5Config) -> float:
    return _output_std(config) if config.tie_embeddings else 1.0


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.self_attention_norm = _norm(config)
        self.self_attention = _attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, bias: Tensor | None, rotation: Rotation | None = None) -> Tensor:
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
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        bias: Tensor | None,
        cross_bias: Tensor | None,
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
        self.dropout = nn.Dropout(config.dropout_rate)

    def bias(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of self-attention logits, for the last `queries` of `keys`."""
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
        seen = visible(
            length, length, x.device, key_mask=attention_mask, query_segments=segments, key_segments=segments
        )
        bias = masked(self.bias(length, length, x), seen, x.dtype)
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
        cache: list[tuple[KeyValueCache, KeyValueCache]] | None = None,
        segments: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries = x.size(1)
        held = cache[0][0].length if cache else 0
        keys = held + queries
        positions = positions_from(held, queries, x.device, positions)
        seen = visible(queries, keys, x.device, causal=True, query_segments=segments, key_segments=segments)
        bias = masked(self.bias(queries, keys, x), seen, x.dtype)
        seen = visible(
            queries,
            encoder_states.size(1),
            x.device,
            key_mask=encoder_attention_mask,
            query_segments=segments,
            key_segments=encoder_segments,
        )
        cross_bias = masked(None, seen, x.dtype)
        turned = self.rotation(positions, x)
        x = self.dropout(self.placed(x, positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, bias, cross_bias, cache[i] if cache else None, turned)
        return self.dropout(self.final_norm(x))


class T5(Model):
    """`forward` returns the loss of every target token; `encode` and `decode` are its two halves."""

    config: T5Config
    decoder_reads_targets = True

    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        rows, d_model = config.padded_vocab_size, config.d_model
        self.embedding = Embedding(rows, d_model, _embedding_std(config))
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.lm_head = Linear(d_model, rows, std=_output_std(config))
        if (
            config.tie_embeddings
        ):  # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
            self.lm_head.weight = self.embedding.weight

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        decoder_input_ids: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
        decoder_positions: Tensor | None = None,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, target_length), fp32; 0 where the label is -100}.

        `encoder_input_ids` (batch, input_length); `encoder_attention_mask`, of the same shape, is nonzero at real
        tokens (None: all). `decoder_input_ids` are by default the labels shifted one to the right. Padding after the
        targets needs no mask: the decoder is causal. Segments keep the examples of a packed row apart. Positions count
        within an example; relative positions don't need them, since packing keeps distances inside an example. The
        z-loss applies in training only.
        """
        if decoder_input_ids is None:
            decoder_input_ids = shift_right(labels, self.config.decoder_start_id, decoder_segment_ids)
        states = self.encode(encoder_input_ids, encoder_attention_mask, encoder_segment_ids, encoder_positions)
        x = self.decoder(
            self.embedding(decoder_input_ids),
            states,
            encoder_attention_mask,
            segments=decoder_segment_ids,
            encoder_segments=encoder_segment_ids,
            positions=decoder_positions,
        )
        return {"labels": configured_losses(self._logits(x), labels, self.config, self.training)}

    def encode(
        self,
        encoder_input_ids: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
    ) -> Tensor:
        """Maps ids (batch, input_length) to states (batch, input_length, d_model)."""
        x = self.embedding(encoder_input_ids)
        return self.encoder(x, encoder_attention_mask, encoder_segment_ids, encoder_positions)

    def decode(
        self,
        decoder_input_ids: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: list[tuple[KeyValueCache, KeyValueCache]] | None = None,
    ) -> Tensor:
        """Maps ids (batch, target_length) to logits (batch, target_length, padded_vocab_size)."""
        x = self.decoder(self.embedding(decoder_input_ids), encoder_states, encoder_attention_mask, cache)
        return self._logits(x)

    def new_cache(self) -> list[tuple[KeyValueCache, KeyValueCache]]:
        """An empty cache for `decode`: (self-attention, cross-attention) of each decoder layer."""
        return [(KeyValueCache(), MemoryCache()) for _ in self.decoder.layers]

    def _logits(self, x: Tensor) -> Tensor:
        return self.lm_head(x * self.config.d_model**-0.5 if self.config.scale_outputs else x)

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Encoder weights process inputs, decoder weights targets; cross-attention's keys and values process inputs."""
        config = self.config
        width = config.num_heads * config.d_kv
        attend = cross_attentions(self.decoder.layers)
        decoder = matrix_weights(self.decoder.layers) - sum(map(matrix_weights, attend))
        return {
            "encoder": 6.0 * matrix_weights(self.encoder.layers) * sizes.inputs
            + 12.0 * width * config.num_encoder_layers * sizes.input_pairs,
            "decoder": 6.0 * decoder * sizes.targets + 12.0 * width * config.num_decoder_layers * sizes.target_pairs,
            "cross-attention": sum(
                attention_flops(one, width, sizes.targets, sizes.inputs, sizes.cross_pairs) for one in attend
            ),
            "head": 6.0 * config.padded_vocab_size * config.d_model * sizes.targets,
        }
