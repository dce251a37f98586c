"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without any bias vector, with relative positions. Version 1.0 has ReLU layers and one
matrix for embedding and output; version 1.1 has gated GELU layers and an output matrix of its own. Other kinds of
positions are options that T5 didn't have.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from pretrain.models.attention_masks import AttentionInputs, AttentionMask, cross_attention_mask
from pretrain.models.blocks import Block, DecoderLayer, EncoderLayer
from pretrain.models.config.blocks import Heads
from pretrain.models.config.t5 import T5Config
from pretrain.models.encoder_decoder import Caches, EncoderDecoder, length_of
from pretrain.models.layers import Dropout, Embedding
from pretrain.models.logit_bias import logit_bias
from pretrain.models.loss_head import Head
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    RelativePositionBias,
    Rotary,
    positions_from,
    rotary_embedding,
    sinusoids,
)


def _block(config: T5Config) -> Block:
    """Layers whose initial deviations follow from the fan-in, and whose attention logits aren't scaled."""
    rate = config.dropout_rate
    return Block(
        Heads(d_model=config.d_model, d_ff=config.d_ff, num_heads=config.num_heads, head_dim=config.d_kv),
        "geglu" if config.feed_forward == "gated-gelu" else "relu",
        "rms",
        config.layer_norm_epsilon,
        dropout_rate=rate,
        attention_dropout_rate=rate,
        activation_dropout_rate=rate,
        scaled=False,
    )


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


class Stack(nn.Module):
    """Dropout, the layers, a final norm, dropout; positions as in `config`.

    The stack owns the relative positions: their bias is computed once and added in each layer. `layers` are drawn after
    the positions, so they come one by one.
    """

    def __init__(self, config: T5Config, block: Block, layers: Iterator[nn.Module], bidirectional: bool):
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
        self.final_norm = block.new_norm()
        self.dropout = Dropout(config.dropout_rate)

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of self-attention logits, for the last `queries` of `keys`, as in `Pattern`."""
        if self.positions == "relative":
            return self.relative_attention_bias(queries, keys)
        return self.linear_bias(queries, keys, x.device, x.dtype) if self.positions == "alibi" else None

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds the vectors of `positions` (length,) or (batch, length) to embeddings (batch, length, d_model)."""
        if self.positions == "sinusoidal":
            return x + sinusoids(positions, x.size(-1), x.dtype)
        return x + self.learned_positions(positions) if self.positions == "learned" else x

    def rotary(self, positions: Tensor, x: Tensor) -> Rotary | None:
        return rotary_embedding(positions, self.d_kv, x.dtype) if self.positions == "rotary" else None


class Encoder(Stack):
    def __init__(self, config: T5Config):
        block = _block(config)
        layers = (EncoderLayer(block) for _ in range(config.num_encoder_layers))
        super().__init__(config, block, layers, bidirectional=True)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape."""
        length, segments = x.size(1), inputs.encoder_segment_ids
        positions = positions_from(0, length, x.device, inputs.encoder_positions)
        bias = logit_bias(
            x,
            length,
            self.diagonals(length, length, x),
            key_mask=inputs.encoder_attention_mask,
            query_segments=segments,
            key_segments=segments,
        )
        mask = AttentionMask(bias, self.rotary(positions, x))
        x = self.dropout(self.add_positions(x, positions))
        for layer in self.layers:
            x = layer(x, mask)
        return self.dropout(self.final_norm(x))


class Decoder(Stack):
    """Self-attention is causal and has positions of its own; cross-attention has none."""

    def __init__(self, config: T5Config):
        block = _block(config)
        layers = (DecoderLayer(block, config.d_model) for _ in range(config.num_decoder_layers))
        super().__init__(config, block, layers, bidirectional=False)

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, past_length, segments = x.size(1), length_of(cache), inputs.decoder_segment_ids
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        diagonals = self.diagonals(queries, keys, x)
        bias = logit_bias(x, keys, diagonals, causal=True, query_segments=segments, key_segments=segments)
        mask = AttentionMask(bias, self.rotary(positions, x))
        cross_mask = cross_attention_mask(x, encoder_states, inputs)
        x = self.dropout(self.add_positions(x, positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, mask, cross_mask, cache[i] if cache else None)
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
