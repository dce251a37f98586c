"""The autoregressive encoder-decoder: Yan, "Auto-regressive Encoder-Decoder Transformer" (2024).

Encoder and decoder read the same tokens, and both are causal. The encoder represents the text so far; the decoder
starts from a linear map of the encoder's output, attends to that output again and predicts the next token. Two parts
are optional: the position embedding of the predicted token is subtracted before the output layer, and a loss pulls the
encoder's output towards the mean of the embeddings so far. Pre-norm, GELU, one matrix for embedding and output.

Unlike in the author's code, attention has no dropout in evaluation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.config.autoregressive import AutoregressiveConfig, EmbeddingLossConfig
from pretrain.models.layers import Dropout, Embedding, FeedForward, LayerNorm, Linear, one_use
from pretrain.models.logit_bias import Pattern, logit_bias
from pretrain.models.loss import Losses
from pretrain.models.loss_head import Head
from pretrain.models.masks import visible
from pretrain.models.model import Model, Sizes, attention_flops, cross_attentions, matrix_weights
from pretrain.models.positions import LearnedPositions, Rotation, positions_from, rotation

# One tuple per layer, the encoder's first: its self-attention and, in the decoder, its cross-attention. All of them
# have the same length.
Cache = list[tuple[KeyValueCache, ...]]


@dataclass(frozen=True)
class Sight:
    """What a query sees. It is the same in all three attentions, since each joins the sequence to itself causally.

    `bias` broadcasts to (batch, heads, queries, keys); `causal` replaces it where only the future is hidden.
    Self- and cross-attention have heads of different widths, hence two rotations.
    """

    bias: Tensor | Pattern | None
    causal: bool
    rotation: Rotation | None = None
    cross_rotation: Rotation | None = None


def _norm(config: AutoregressiveConfig) -> LayerNorm:
    return LayerNorm(config.d_model, bias=config.bias)


def _attention(config: AutoregressiveConfig, num_heads: int, bias: bool, out_std: float) -> Attention:
    return Attention(
        config.d_model,
        config.d_model // num_heads,
        num_heads,
        config.dropout_rate,
        scaled=True,
        bias=bias,
        std=config.hidden_std(config.init_std),
        out_std=out_std,
    )


def _self_attention(config: AutoregressiveConfig, out_std: float) -> Attention:
    return _attention(config, config.num_heads, config.bias, out_std)


def _cross_attention(config: AutoregressiveConfig, out_std: float) -> Attention:
    bias = config.bias if config.cross_attention_bias is None else config.cross_attention_bias
    return _attention(config, config.cross_heads, bias, out_std)


def _feed_forward(config: AutoregressiveConfig, out_std: float) -> FeedForward:
    d_ff = config.d_ff or 4 * config.d_model
    return FeedForward(
        config.d_model,
        d_ff,
        activation="gelu",
        bias=config.bias,
        std=config.hidden_std(config.init_std),
        out_std=out_std,
    )


def _residual_std(config: AutoregressiveConfig, num_layers: int) -> float:
    """The std of matrices that end a residual branch. A stack counts its own layers (the author's are equally deep)."""
    return config.hidden_std(config.init_std) * (2 * num_layers) ** -0.5


class EncoderLayer(nn.Module):
    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        out_std = _residual_std(config, config.num_encoder_layers)
        self.self_attention_norm = _norm(config)
        self.self_attention = _self_attention(config, out_std)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = _feed_forward(config, out_std)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, sight: Sight, cache: tuple[KeyValueCache, ...] | None = None) -> Tensor:
        attended = self.self_attention(
            self.self_attention_norm(x),
            bias=sight.bias,
            causal=sight.causal,
            rotation=sight.rotation,
            cache=cache[0] if cache else None,
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    """Each decoder layer normalises the encoder's output itself: the encoder has no final norm."""

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        out_std = _residual_std(config, config.num_decoder_layers)
        self.self_attention_norm = _norm(config)
        self.self_attention = _self_attention(config, out_std)
        self.cross_attention_norm = _norm(config)
        self.encoder_norm = _norm(config)
        self.cross_attention = _cross_attention(config, out_std)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = _feed_forward(config, out_std)
        self.dropout = Dropout(config.dropout_rate)
        self.cross_attention_first = config.order == "alternate"

    def forward(
        self, x: Tensor, encoder_out: Tensor, sight: Sight, cache: tuple[KeyValueCache, ...] | None = None
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        if self.cross_attention_first:
            x = self._attend_across(x, encoder_out, sight, cross_cache)
            x = self._attend(x, sight, self_cache)
        else:
            x = self._attend(x, sight, self_cache)
            x = self._attend_across(x, encoder_out, sight, cross_cache)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def _attend(self, x: Tensor, sight: Sight, cache: KeyValueCache | None) -> Tensor:
        attended = self.self_attention(
            self.self_attention_norm(x), bias=sight.bias, causal=sight.causal, rotation=sight.rotation, cache=cache
        )
        return x + self.dropout(attended)

    def _attend_across(self, x: Tensor, encoder_out: Tensor, sight: Sight, cache: KeyValueCache | None) -> Tensor:
        attended = self.cross_attention(
            self.cross_attention_norm(x),
            self.encoder_norm(encoder_out),
            bias=sight.bias,
            causal=sight.causal,
            rotation=sight.cross_rotation,
            memory_rotation=sight.cross_rotation,
            cache=cache,
        )
        return x + self.dropout(attended)


class Bridge(nn.Module):
    """The decoder's input: a linear map of the encoder's output."""

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        self.norm = _norm(config) if config.bridge_norm else nn.Identity()
        self.linear = Linear(config.d_model, config.d_model, config.hidden_std(config.init_std), config.bias)

    def forward(self, encoder_out: Tensor) -> Tensor:
        return self.linear(self.norm(encoder_out))


class EmbeddingLoss(nn.Module):
    """The distance of the encoder's output, at each position, from the mean of the embeddings up to that position.

    Norms that learn have biases, even in a model without.
    """

    def __init__(self, config: EmbeddingLossConfig, d_model: int):
        super().__init__()
        self.config = config
        learned = config.learned_norms
        on_embedding = config.embedding_norm != "none"
        self.embedding_norm = LayerNorm(d_model, bias=learned, gains=learned) if on_embedding else nn.Identity()
        self.encoder_norm = LayerNorm(d_model, bias=learned, gains=learned) if config.encoder_norm else nn.Identity()

    def forward(self, embeddings: Tensor, encoder_out: Tensor, segments: Tensor | None) -> Tensor:
        """Distances (batch, length), at least fp32, without the coefficient; inputs are (batch, length, d_model)."""
        if self.config.detach == "embedding":
            embeddings = embeddings.detach()
        elif self.config.detach == "encoder_out":
            encoder_out = encoder_out.detach()
        if self.config.embedding_norm == "before_mean":
            embeddings = self.embedding_norm(embeddings)
        means = running_mean(embeddings, segments)
        if self.config.embedding_norm == "after_mean":
            means = self.embedding_norm(means)
        encoder_out = self.encoder_norm(encoder_out)
        if self.config.kind == "mse":
            return (_precise(means) - _precise(encoder_out)).square().mean(dim=-1)
        similarity = (F.cosine_similarity(_precise(means), _precise(encoder_out), dim=-1) + 1) / 2
        return 1 - similarity if self.config.kind == "cosine" else -similarity.log()


def running_mean(x: Tensor, segments: Tensor | None = None) -> Tensor:
    """The mean of `x` (batch, length, d_model) up to and including each position, restarted in each of `segments`.

    Computed as a product with a triangular matrix: with differences of cumulative sums, rounding would leak from one
    example of a row into the next.
    """
    length = x.size(1)
    seen = visible(length, length, x.device, causal=True, query_segments=segments, key_segments=segments)
    assert seen is not None
    precise = _precise(x)
    weights = seen[:, 0].to(precise.dtype)
    return ((weights / weights.sum(dim=-1, keepdim=True)) @ precise).to(x.dtype)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Autoregressive(Model):
    """`forward` returns the loss of each token given those before it; `decode` returns logits, optionally cached."""

    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        self.config = config
        rows, d_model = config.padded_vocab_size, config.d_model
        self.embedding = Embedding(rows, d_model, config.init_std)
        self.position_embedding: LearnedPositions | None = None
        if config.max_positions is not None:
            self.position_embedding = LearnedPositions(
                config.max_positions + config.reads_next_position, d_model, config.init_std
            )
        self.dropout = Dropout(config.dropout_rate)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.bridge = Bridge(config)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.final_norm = _norm(config)
        self.subtracted_norm = _norm(config) if config.subtract_positions == "with_norm" else nn.Identity()
        self.lm_head = Head(d_model, rows, config.init_std, multiplier=config.logits_multiplier)
        # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
        self.lm_head.weight = self.embedding.weight
        self.embedding_loss = EmbeddingLoss(config.embedding_loss, d_model) if config.embedding_loss else None

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        decoder_positions: Tensor | None = None,
        target_indices: Tensor | None = None,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label, "embedding_loss": in training, times its coefficient}.

        Both are (batch, length), fp32, 0 where the label is -100. `encoder_input_ids` (batch, length) are the labels
        shifted one to the right, so the decoder's segments and positions add nothing and are ignored.
        `encoder_attention_mask`, nonzero at real tokens (None: all), and segments apply everywhere, also to the mean of
        the embeddings. `target_indices` as in `Head`.
        """
        segments = encoder_attention_mask if encoder_segment_ids is None else encoder_segment_ids
        embeddings, encoder_out, x = self._run(encoder_input_ids, segments, encoder_positions, None)
        losses = {"labels": self.lm_head(x, labels, self.config, target_indices)}
        if self.embedding_loss is not None and self.training:
            distances = self.embedding_loss(embeddings, encoder_out, segments)
            scaled = self.embedding_loss.config.coefficient * distances
            losses["embedding_loss"] = scaled.masked_fill(labels == IGNORE_INDEX, 0.0)
        return losses

    def decode(self, input_ids: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size).

        With a cache, the ids follow those it has seen, and `attention_mask` (batch, seen + length) covers both. Prompts
        of different lengths are padded on the left. Positions count from the first real token.
        """
        return self.lm_head(self._run(input_ids, attention_mask, None, cache)[2])

    def new_cache(self) -> Cache:
        """An empty cache for `decode`."""
        encoder: Cache = [(KeyValueCache(),) for _ in self.encoder]
        return encoder + [(KeyValueCache(), KeyValueCache()) for _ in self.decoder]

    def _run(
        self, input_ids: Tensor, segments: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns embeddings after dropout, the encoder's output and what the head takes.

        `segments` (batch, keys) are 0 at padding.
        """
        length, device = input_ids.size(1), input_ids.device
        held = cache[0][0].length if cache else 0
        own = None if segments is None else segments[:, held:]
        seen = None
        if held or segments is not None:
            seen = visible(length, held + length, device, causal=True, query_segments=own, key_segments=segments)
        if positions is None:
            self._check_length(held + length)
            if segments is not None and seen is not None:  # the number of tokens that it sees before itself
                positions = seen.sum(dim=-1)[:, 0] - 1
        positions = positions_from(held, length, device, positions)
        embeddings = self.embedding(input_ids)
        if self.position_embedding is not None:
            embeddings = embeddings + self.position_embedding(positions)
        embeddings = self.dropout(embeddings)
        bias = None
        if seen is not None:
            keys = held + length
            bias = logit_bias(embeddings, keys, causal=True, query_segments=own, key_segments=segments)
        sight = self._sight(bias, positions, embeddings.dtype)
        encoder_out = one_use(embeddings)
        caches: Iterator[tuple[KeyValueCache, ...] | None] = iter(cache) if cache else repeat(None)
        for layer in self.encoder:
            encoder_out = layer(encoder_out, sight, next(caches))
        x = self.bridge(encoder_out)
        if self.config.add_positions:
            x = x + self._next_positions(positions)
        for layer in self.decoder:
            x = layer(x, encoder_out, sight, next(caches))
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            x = self.subtracted_norm(x - self._next_positions(positions))
        return embeddings, encoder_out, x

    def _check_length(self, length: int) -> None:
        most = self.config.max_positions
        if most is not None and length > most:
            raise ValueError(f"{length} tokens exceed the model's {most} learned positions")

    def _sight(self, bias: Tensor | Pattern | None, positions: Tensor, dtype: torch.dtype) -> Sight:
        causal = bias is None
        if self.config.positions == "learned":
            return Sight(bias, causal)
        d_model = self.config.d_model
        widths = d_model // self.config.num_heads, d_model // self.config.cross_heads
        return Sight(bias, causal, *(rotation(positions, width, dtype) for width in widths))

    def _next_positions(self, positions: Tensor) -> Tensor:
        assert self.position_embedding is not None, "checked with the config"
        return self.position_embedding(positions + 1)

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Every weight is used once per token; all three kinds of attention join the sequence to itself.

        The map from the encoder to the decoder belongs to the decoder. The mean in the embedding loss counts nothing: a
        running sum would do.
        """
        config, tokens, pairs = self.config, sizes.inputs, sizes.input_pairs
        attend = cross_attentions(self.decoder)
        decoder = matrix_weights(self.bridge) + matrix_weights(self.decoder) - sum(map(matrix_weights, attend))
        return {
            "encoder": 6.0 * matrix_weights(self.encoder) * tokens
            + 12.0 * config.d_model * config.num_encoder_layers * pairs,
            "decoder": 6.0 * decoder * tokens + 12.0 * config.d_model * config.num_decoder_layers * pairs,
            "cross-attention": sum(attention_flops(one, config.d_model, tokens, tokens, pairs) for one in attend),
            "head": 6.0 * config.padded_vocab_size * config.d_model * tokens,
        }
