"""The Transformer: Vaswani et al., "Attention Is All You Need" (2017).

A post-norm encoder-decoder, LayerNorm(x + Dropout(Sublayer(x))), with sinusoidal positions and one matrix for both
embeddings and the output. Its layers and stacks are BART's too.
"""

import math
from collections.abc import Callable

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache, MemoryCache
from pretrain.models.config import VanillaConfig
from pretrain.models.config.transformer import TransformerConfig
from pretrain.models.layers import Embedding, FeedForward, LayerNorm, Linear
from pretrain.models.loss import Losses, configured_losses, shift_right
from pretrain.models.masks import masked, visible
from pretrain.models.model import Model, Sizes, attention_flops, cross_attentions, matrix_weights
from pretrain.models.positions import positions_from, sinusoids

# The standard deviation of the first logits. With the authors' own N(0, 1/d_model) embeddings it would be 1, the first
# loss ln V + 1/2, and more for the tied matrix, by which a decoder starts out predicting its own input.
OUTPUT_STD = 0.5

Caches = list[tuple[KeyValueCache, KeyValueCache]]
# Makes the module that turns token vectors (batch, length, d_model) and positions into the input of the first layer.
NewInputs = Callable[[], nn.Module]


def _attention(config: TransformerConfig, std: float | None) -> Attention:
    return Attention(
        config.d_model,
        config.d_kv,
        config.num_heads,
        config.attention_dropout_rate,
        scaled=True,
        bias=True,
        std=std or config.d_model**-0.5,
    )


def _feed_forward(config: TransformerConfig, std: float | None) -> FeedForward:
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

    def __init__(self, config: TransformerConfig, std: float | None):
        super().__init__()
        self.self_attention = _attention(config, std)
        self.self_attention_norm = LayerNorm(config.d_model)
        self.feed_forward = _feed_forward(config, std)
        self.feed_forward_norm = LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = self.self_attention_norm(x + self.dropout(self.self_attention(x, bias=bias)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class DecoderLayer(nn.Module):
    """`std` as in `EncoderLayer`."""

    def __init__(self, config: TransformerConfig, std: float | None):
        super().__init__()
        self.self_attention = _attention(config, std)
        self.self_attention_norm = LayerNorm(config.d_model)
        self.cross_attention = _attention(config, std)
        self.cross_attention_norm = LayerNorm(config.d_model)
        self.feed_forward = _feed_forward(config, std)
        self.feed_forward_norm = LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        encoder_states: Tensor,
        bias: Tensor | None,
        causal: bool,
        cross_bias: Tensor | None,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        attended = self.self_attention(x, bias=bias, cache=self_cache, causal=causal)
        x = self.self_attention_norm(x + self.dropout(attended))
        attended = self.cross_attention(x, encoder_states, bias=cross_bias, cache=cross_cache)
        x = self.cross_attention_norm(x + self.dropout(attended))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Encoder(nn.Module):
    def __init__(self, config: TransformerConfig, inputs: nn.Module, std: float | None):
        super().__init__()
        self.inputs = inputs
        self.layers = nn.ModuleList(EncoderLayer(config, std) for _ in range(config.num_encoder_layers))

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape."""
        length = x.size(1)
        seen = visible(
            length, length, x.device, key_mask=attention_mask, query_segments=segments, key_segments=segments
        )
        bias = masked(None, seen, x.dtype)
        x = self.inputs(x, positions_from(0, length, x.device, positions))
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Decoder(nn.Module):
    def __init__(self, config: TransformerConfig, inputs: nn.Module, std: float | None):
        super().__init__()
        self.inputs = inputs
        self.layers = nn.ModuleList(DecoderLayer(config, std) for _ in range(config.num_decoder_layers))

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
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it.

        Without cache and segments, the kernel's causal flag replaces the mask.
        """
        held, queries = cache[0][0].length if cache else 0, x.size(1)
        causal = not held and segments is None
        seen = visible(
            queries,
            held + queries,
            x.device,
            causal=not causal,
            query_segments=segments,
            key_segments=segments,
        )
        bias = masked(None, seen, x.dtype)
        seen = visible(
            queries,
            encoder_states.size(1),
            x.device,
            key_mask=encoder_attention_mask,
            query_segments=segments,
            key_segments=encoder_segments,
        )
        cross_bias = masked(None, seen, x.dtype)
        x = self.inputs(x, positions_from(held, queries, x.device, positions))
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, bias, causal, cross_bias, cache[i] if cache else None)
        return x


class Transformer(Model):
    """The base of the Transformer and BART. `forward` returns the loss of every target token."""

    config: TransformerConfig
    decoder_reads_targets = True

    def __init__(
        self,
        config: TransformerConfig,
        new_inputs: NewInputs,
        lm_head: Linear,
        embedding: Embedding,
        std: float | None,
    ):
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.encoder = Encoder(config, new_inputs(), std)
        self.decoder = Decoder(config, new_inputs(), std)
        self.lm_head = lm_head
        # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
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
        targets needs no mask: the decoder is causal. Segments keep the examples of a packed row apart; positions count
        within an example. Label smoothing and z-loss apply in training only.
        """
        if decoder_input_ids is None:
            start_id, pad_id = self.config.decoder_start_id, self.config.pad_id
            decoder_input_ids = shift_right(labels, start_id, decoder_segment_ids, pad_id)
        states = self.encode(encoder_input_ids, encoder_attention_mask, encoder_segment_ids, encoder_positions)
        x = self.decoder(
            self.embedding(decoder_input_ids),
            states,
            encoder_attention_mask,
            segments=decoder_segment_ids,
            encoder_segments=encoder_segment_ids,
            positions=decoder_positions,
        )
        return {"labels": configured_losses(self.lm_head(x), labels, self.config, self.training)}

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
        cache: Caches | None = None,
    ) -> Tensor:
        """Maps ids (batch, target_length) to logits (batch, target_length, padded_vocab_size)."""
        x = self.decoder(self.embedding(decoder_input_ids), encoder_states, encoder_attention_mask, cache)
        return self.lm_head(x)

    def new_cache(self) -> Caches:
        """An empty cache for `decode`: (self-attention, cross-attention) of each decoder layer."""
        return [(KeyValueCache(), MemoryCache()) for _ in self.decoder.layers]

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Encoder weights process inputs, decoder weights targets; cross-attention's keys and values process inputs."""
        config = self.config
        width = config.d_model
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


class SinusoidalInputs(nn.Module):
    """Token vectors times √d_model, plus sinusoids (sections 3.4 and 3.5)."""

    def __init__(self, config: VanillaConfig):
        super().__init__()
        self.scale = math.sqrt(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(x * self.scale + sinusoids(positions, x.size(-1), x.dtype))


class Vanilla(Transformer):
    """The original Transformer."""

    def __init__(self, config: VanillaConfig):
        rows, d_model, std = config.padded_vocab_size, config.d_model, OUTPUT_STD * config.d_model**-0.5
        super().__init__(
            config,
            new_inputs=lambda: SinusoidalInputs(config),
            embedding=Embedding(rows, d_model, std),
            lm_head=Linear(d_model, rows, std),
            std=None,
        )
