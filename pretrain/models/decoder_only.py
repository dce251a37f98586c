"""A decoder-only model: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).

Pre-norm, with learned positions, GELU and one matrix for embedding and output. Without biases it is the baseline of
"Auto-regressive Encoder-Decoder Transformer" (Yan 2024), whose subtraction of positions is an option here too, as are
rotary, linear-bias and sinusoidal positions, and what later decoders changed in the layers: Llama (Touvron et al.
2023), Gemma 2 (2024), Gemma 3 and Qwen3 (2025).
"""

import torch
from torch import Tensor, nn

from pretrain.models.attention import KeyValueCache
from pretrain.models.attention_masks import (
    AttentionInputs,
    AttentionMask,
    LayerMasks,
    before_only,
    self_attention_mask,
)
from pretrain.models.blocks import Block, EncoderLayer
from pretrain.models.config.decoder_only import DecoderOnlyConfig
from pretrain.models.layers import Dropout, Embedding, times_root
from pretrain.models.loss import Losses
from pretrain.models.loss_head import Head
from pretrain.models.model import Model, Sizes, matrix_weights
from pretrain.models.positions import (
    LearnedPositions,
    LinearBias,
    Rotary,
    positions_from,
    real_positions,
    rotary_embedding,
    sinusoids,
)
from pretrain.models.visibility import Window


def _block(config: DecoderOnlyConfig) -> Block:
    return Block(
        config,
        config.activation,
        config.norm,
        config.layer_norm_epsilon,
        config.norm_after,
        config.qk_norm,
        config.biases,
        config.attention_softcap,
        config.dropout_rate,
        attention_dropout_rate=config.dropout_rate,
        std=config.hidden_std(config.init_std),
        # The sum of 2 · num_layers branches then starts with the std of one (Radford et al. 2019, section 2.3).
        out_std=config.hidden_std(config.init_std) / (2 * config.num_layers) ** 0.5,
    )


class Decoder(nn.Module):
    """Causal self-attention and feed-forward layers."""

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        self.positions = self.linear_bias = None
        if config.positions == "learned":
            assert config.max_positions is not None
            subtracts = config.subtract_positions != "none"  # also the position after the last token
            self.positions = LearnedPositions(config.max_positions + subtracts, config.d_model, config.init_std)
        elif config.positions == "alibi":
            self.linear_bias = LinearBias(config.num_heads)
        self.layer_masks = LayerMasks(config, config.num_layers, before_only)
        block = _block(config)
        self.layers = nn.ModuleList(EncoderLayer(block, "attention") for _ in range(config.num_layers))
        self.final_norm = block.new_norm()
        self.subtracted_norm = block.new_norm() if config.subtract_positions == "with_norm" else nn.Identity()
        self.dropout = Dropout(config.dropout_rate)

    def forward(
        self, x: Tensor, inputs: AttentionInputs = AttentionInputs(), cache: list[KeyValueCache] | None = None
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows its tokens.

        The attention mask (batch, past length + length) covers the cached tokens too.
        """
        queries, past_length = x.size(1), cache[0].length if cache else 0
        keys, positions = past_length + queries, inputs.encoder_positions
        attention_mask = inputs.encoder_attention_mask
        if positions is None and attention_mask is not None:
            positions = real_positions(attention_mask)[:, past_length:]
        positions = positions_from(past_length, queries, x.device, positions)
        x = self.dropout(self.add_positions(x, positions))

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            return self_attention_mask(
                x,
                keys,
                self.rotary(positions, base, x.dtype),
                causal=True,
                window=window,
                diagonals=self.diagonals(queries, keys, x),
                key_mask=attention_mask,
                segments=inputs.encoder_segment_ids,
            )

        masks = self.layer_masks.for_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i], cache[i] if cache else None)
        return self.finished(x, positions)

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of attention logits, for the last `queries` of `keys`, as in `Pattern`."""
        return None if self.linear_bias is None else self.linear_bias(queries, keys, x.device, x.dtype)

    def rotary(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotary | None:
        """The rotations of attention; None with other positions."""
        return rotary_embedding(positions, self.config.d_kv, dtype, base) if self.config.positions == "rotary" else None

    def finished(self, x: Tensor, positions: Tensor) -> Tensor:
        """The decoder's output, for that of its last layer."""
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            assert self.positions is not None, "checked with the config"
            x = self.subtracted_norm(x - self.positions(positions + 1))
        return x

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer: `x`, scaled if so configured, and position vectors if there are any."""
        if self.config.scale_embedding:
            x = times_root(x, self.config.widening)
        if self.positions is not None:
            return x + self.positions(positions)
        if self.config.positions == "sinusoidal":  # scaled to the initial std of learned positions
            return x + self.config.init_std * 2**0.5 * sinusoids(positions, x.size(-1), x.dtype)
        return x


class DecoderOnly(Model):
    """`forward` returns the loss of every target token, `decode` the logits of the next token."""

    config: DecoderOnlyConfig

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        rows, std = config.padded_vocab_size, config.init_std
        self.embedding = Embedding(rows, config.d_model, std)
        self.decoder = Decoder(config)
        self.lm_head = Head(
            config.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier
        )
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight  # shared: each module uses it only in its own forward

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        *,
        target_indices: Tensor | None = None,
        **attention: Tensor,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, length), fp32; 0 where the label is -100}.

        labels[t] is the token after encoder_input_ids[t]. Labels share segments and positions with the inputs. The
        z-loss applies in training only. `target_indices` as in `Head`, `attention` as in `AttentionInputs`.
        """
        x = self.decoder(self.embedding(encoder_input_ids), AttentionInputs(**attention))
        return {"labels": self.lm_head(x, labels, self.config, target_indices)}

    def decode(
        self, input_ids: Tensor, cache: list[KeyValueCache] | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size). With a cache, ids follow its tokens.

        `attention_mask` (batch, past length + length), nonzero at real tokens, covers the cached tokens too. Positions
        count from the first real token of a prompt padded on the left.
        """
        return self.lm_head(self.decoder(self.embedding(input_ids), AttentionInputs(attention_mask), cache))

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `decode`, one for each layer."""
        return [KeyValueCache() for _ in self.decoder.layers]

    def flops_by_part(self, sizes: Sizes) -> dict[str, float]:
        """Every weight is used once per token."""
        config = self.config
        pairs = self.decoder.layer_masks.pairs(sizes.inputs, sizes.input_pairs)
        return {
            "decoder": 6.0 * matrix_weights(self.decoder.layers) * sizes.inputs
            + 12.0 * config.num_heads * config.d_kv * pairs,
            "head": 6.0 * config.padded_vocab_size * config.d_model * sizes.inputs,
        }
