"""A decoder alone: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).

Pre-norm, with learned positions, GELU and one matrix for embedding and output. Without biases it is the baseline of
"Auto-regressive Encoder-Decoder Transformer" (Yan 2024), whose subtraction of positions is an option here too, as are
rotary, linear-bias and sinusoidal positions.
"""

from torch import Tensor, nn

from pretrain.models.attention import Attention, KeyValueCache
from pretrain.models.config.decoder_only import DecoderOnlyConfig
from pretrain.models.layers import Dropout, Embedding, FeedForward, LayerNorm
from pretrain.models.logit_bias import Pattern, logit_bias
from pretrain.models.loss import Losses
from pretrain.models.loss_head import Head
from pretrain.models.model import Model, Sizes, matrix_weights
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    Rotation,
    positions_from,
    real_positions,
    rotation,
    sinusoids,
)

STD = 0.02


def _norm(config: DecoderOnlyConfig) -> LayerNorm:
    return LayerNorm(config.d_model, config.layer_norm_epsilon, config.biases)


class Layer(nn.Module):
    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        std = config.hidden_std(STD)
        # The sum of 2 · num_layers branches then starts with the std of one (Radford et al. 2019, section 2.3).
        out_std = std / (2 * config.num_layers) ** 0.5
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.d_model,
            config.d_kv,
            config.num_heads,
            config.dropout_rate,
            scaled=True,
            bias=config.biases,
            std=std,
            out_std=out_std,
        )
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(
            config.d_model, config.d_ff, activation=config.activation, bias=config.biases, std=std, out_std=out_std
        )
        self.dropout = Dropout(config.dropout_rate)

    def forward(
        self, x: Tensor, bias: Tensor | Pattern | None, causal: bool, turn: Rotation | None, cache: KeyValueCache | None
    ) -> Tensor:
        states = self.attention(self.attention_norm(x), bias=bias, causal=causal, rotation=turn, cache=cache)
        x = x + self.dropout(states)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """Causal self-attention and feed-forward layers."""

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        self.positions = self.linear_bias = None
        if config.positions == "learned":
            assert config.max_positions is not None
            subtracts = config.subtract_positions != "none"  # also the position after the last token
            self.positions = LearnedPositions(config.max_positions + subtracts, config.d_model, STD)
        elif config.positions == "alibi":
            self.linear_bias = LinearBias(config.num_heads)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = _norm(config)
        self.subtracted_norm = _norm(config) if config.subtract_positions == "with_norm" else nn.Identity()
        self.dropout = Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows its tokens.

        `attention_mask` (batch, held + length) covers the cached tokens too.
        """
        queries, held = x.size(1), cache[0].length if cache else 0
        if positions is None and attention_mask is not None:
            positions = real_positions(attention_mask)[:, held:]
        positions = positions_from(held, queries, x.device, positions)
        x = self.dropout(self.placed(x, positions))
        bias, causal = self._bias(x, held + queries, attention_mask, segments)
        turn = rotation(positions, self.config.d_kv, x.dtype) if self.config.positions == "rotary" else None
        for i, layer in enumerate(self.layers):
            x = layer(x, bias, causal, turn, cache[i] if cache else None)
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            assert self.positions is not None, "checked with the config"
            x = self.subtracted_norm(x - self.positions(positions + 1))
        return x

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds position vectors to `x`, for the kinds of positions that have them."""
        if self.positions is not None:
            return x + self.positions(positions)
        if self.config.positions == "sinusoidal":  # scaled to the initial std of learned positions
            return x + STD * 2**0.5 * sinusoids(positions, x.size(-1), x.dtype)
        return x

    def _bias(
        self, x: Tensor, keys: int, attention_mask: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor | Pattern | None, bool]:
        """Returns the bias of attention logits, and whether it would hide the future only."""
        queries = x.size(1)
        if self.linear_bias is None and attention_mask is None and segments is None:
            if queries == 1:
                return None, False
            if queries == keys:
                return None, True
        diagonals = None if self.linear_bias is None else self.linear_bias(queries, keys, x.device, x.dtype)
        bias = logit_bias(
            x,
            keys,
            diagonals,
            causal=queries > 1,
            key_mask=attention_mask,
            query_segments=segments,
            key_segments=segments,
        )
        return bias, False


class DecoderOnly(Model):
    """`forward` returns the loss of every target token, `decode` the logits of the next token."""

    config: DecoderOnlyConfig

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        rows = config.padded_vocab_size
        self.embedding = Embedding(rows, config.d_model, STD)
        self.decoder = Decoder(config)
        self.lm_head = Head(config.d_model, rows, STD, multiplier=config.logits_multiplier)
        self.lm_head.weight = self.embedding.weight  # shared: each module uses it only in its own forward

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_segment_ids: Tensor | None = None,
        encoder_positions: Tensor | None = None,
        decoder_segment_ids: Tensor | None = None,
        decoder_positions: Tensor | None = None,
        target_places: Tensor | None = None,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, length), fp32; 0 where the label is -100}.

        labels[t] is the token after encoder_input_ids[t]. Labels share segments and positions with the inputs.
        Segments keep the examples of a packed row apart. The z-loss applies in training only. `target_places` as in
        `Head`.
        """
        x = self.decoder(
            self.embedding(encoder_input_ids), encoder_attention_mask, encoder_segment_ids, encoder_positions
        )
        return {"labels": self.lm_head(x, labels, self.config, target_places)}

    def decode(
        self, input_ids: Tensor, cache: list[KeyValueCache] | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size). With a cache, ids follow its tokens.

        `attention_mask` (batch, held + length), nonzero at real tokens, covers the cached tokens too. Positions count
        from the first real token of a prompt padded on the left.
        """
        return self.lm_head(self.decoder(self.embedding(input_ids), attention_mask, cache=cache))

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `decode`, one for each layer."""
        return [KeyValueCache() for _ in self.decoder.layers]

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Every weight is used once per token."""
        config = self.config
        return {
            "decoder": 6.0 * matrix_weights(self.decoder.layers) * sizes.inputs
            + 12.0 * config.d_model * config.num_layers * sizes.input_pairs,
            "head": 6.0 * config.padded_vocab_size * config.d_model * sizes.inputs,
        }
