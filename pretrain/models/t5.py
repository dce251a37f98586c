"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without any bias vector, with relative positions. Version 1.0 has ReLU layers and one
matrix for embedding and output; version 1.1 has gated GELU layers and an output matrix of its own. Other kinds of
positions are options that T5 didn't have.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pretrain.config.models import Heads, T5Config
from pretrain.models.blocks import Block
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import Embedding
from pretrain.models.loss_head import Head
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    RelativePositionBias,
    Rotary,
    sinusoids,
)
from pretrain.models.stacks import Decoder, Encoder, Stack


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


class T5Stack(Stack):
    """Positions as in `config`. The stack owns the relative ones: their bias is computed once for all layers."""

    bidirectional: ClassVar[bool]

    def new_positions(self, config: T5Config) -> None:
        self.kind = config.positions
        if self.kind == "relative":
            self.relative_attention_bias = _relative_attention_bias(config, self.bidirectional)
        elif self.kind == "alibi":
            self.linear_bias = LinearBias(config.num_heads, self.bidirectional)
        elif self.kind == "learned":
            assert config.max_positions is not None
            self.learned_positions = LearnedPositions(config.max_positions, config.d_model, _embedding_std(config))

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        if self.kind == "relative":
            return self.relative_attention_bias(queries, keys)
        return self.linear_bias(queries, keys, x.device, x.dtype) if self.kind == "alibi" else None

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "sinusoidal":
            x = x + sinusoids(positions, x.size(-1), x.dtype)
        return self.dropout(x + self.learned_positions(positions) if self.kind == "learned" else x)

    def rotary(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotary | None:
        return super().rotary(positions, base, dtype) if self.kind == "rotary" else None


class T5Encoder(T5Stack, Encoder):
    bidirectional = True


class T5Decoder(T5Stack, Decoder):
    """Self-attention has positions of its own; cross-attention has none."""

    bidirectional = False


class T5(EncoderDecoder):
    """T5 with any of the positions of `T5Config`."""

    config: T5Config

    def __init__(self, config: T5Config):
        rows, d_model = config.padded_vocab_size, config.d_model
        super().__init__(
            config,
            Embedding(rows, d_model, _embedding_std(config)),
            T5Encoder(config, _block(config), config.num_encoder_layers),
            T5Decoder(config, _block(config), config.num_decoder_layers),
            Head(d_model, rows, std=_output_std(config), multiplier=config.logits_multiplier),
            config.tie_embeddings,
        )

    def before_head(self, x: Tensor) -> Tensor:
        return x * self.config.d_model**-0.5 if self.config.scale_outputs else x
