"""A decoder-only model: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).

Pre-norm, with learned positions, GELU and one matrix for embedding and output. Without biases it is the baseline of
"Auto-regressive Encoder-Decoder Transformer" (Yan 2024), whose subtraction of positions is an option here too, as are
rotary, linear-bias and sinusoidal positions, and what later decoders changed in the layers: Llama (Touvron et al.
2023), Gemma 2 (2024), Gemma 3 and Qwen3 (2025).
"""

import torch
from torch import Tensor, nn

from pretrain.config.models import DecoderOnlyConfig
from pretrain.models.attention import AttentionInputs, KeyValueCache, real_positions
from pretrain.models.layers import Embedding, scaled_embeddings
from pretrain.models.model import Head, Losses, Model
from pretrain.models.positions import LearnedPositions, LinearBias, Rotary, sinusoids
from pretrain.models.stacks import Encoder, LayerConfig


def _layer_config(config: DecoderOnlyConfig) -> LayerConfig:
    return LayerConfig(
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


class CausalStack(Encoder):
    """Causal self-attention and feed-forward layers. Positions count from the first real token of a prompt."""

    causal = True

    def __init__(self, config: DecoderOnlyConfig):
        layer = _layer_config(config)
        super().__init__(config, layer, config.num_layers, name="attention")
        self.subtracted_norm = layer.new_norm() if config.subtract_positions == "with_norm" else nn.Identity()

    def new_positions(self, config: DecoderOnlyConfig) -> None:
        self.config, self.linear_bias = config, None
        if config.positions == "learned":
            assert config.max_positions is not None
            subtracts = config.subtract_positions != "none"  # also the position after the last token
            self.positions = LearnedPositions(config.max_positions + subtracts, config.d_model, config.init_std)
        elif config.positions == "alibi":
            self.linear_bias = LinearBias(config.num_heads)

    def given_positions(self, inputs: AttentionInputs, past_length: int) -> Tensor | None:
        if inputs.encoder_positions is None and inputs.encoder_attention_mask is not None:
            return real_positions(inputs.encoder_attention_mask)[:, past_length:]
        return inputs.encoder_positions

    def prefix(self, inputs: AttentionInputs) -> Tensor | None:
        return inputs.prefix_mask if self.config.prefix_attention == "bidirectional" else None

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.config.positions == "sinusoidal":  # scaled to the initial std of learned positions
            x = scaled_embeddings(x, self.widening) if self.scale_embedding else x
            return self.dropout(x + self.config.init_std * 2**0.5 * sinusoids(positions, x.size(-1), x.dtype))
        return super().add_positions(x, positions)

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        return None if self.linear_bias is None else self.linear_bias(queries, keys, x.device, x.dtype)

    def rotary(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotary | None:
        return super().rotary(positions, base, dtype) if self.config.positions == "rotary" else None

    def finished(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            assert self.positions is not None, "checked with the config"
            x = self.subtracted_norm(x - self.positions(positions + 1))
        return x


class DecoderOnly(Model):
    """`forward` returns the loss of every target token, `decode` the logits of the next token."""

    config: DecoderOnlyConfig

    def __init__(self, config: DecoderOnlyConfig):
        super().__init__()
        self.config = config
        rows, std = config.padded_vocab_size, config.init_std
        self.embedding = Embedding(rows, config.d_model, std)
        self.decoder = CausalStack(config)
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
        z-loss applies in training only. `target_indices` are the indices of the labels that count,
        `attention` the tensors of `AttentionInputs`.
        """
        x = self.decoder(self.embedding(encoder_input_ids), AttentionInputs(**attention))
        return {"labels": self.lm_head(x, labels, self.config, target_indices)}

    def decode(
        self, input_ids: Tensor, cache: list[KeyValueCache] | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size). With a cache, ids follow its tokens.

        `attention_mask` (batch, past length + length), nonzero at real tokens, covers the cached tokens too. Positions
        count from the first real token of a prompt padded on the left. Ids that go into an empty cache are a prefix.
        """
        inputs = AttentionInputs(attention_mask)
        if cache is not None and not cache[0].length:
            inputs = inputs._replace(
                prefix_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask
            )
        return self.lm_head(self.decoder(self.embedding(input_ids), inputs, cache))

    def new_cache(self) -> list[KeyValueCache]:
        """An empty cache for `decode`, one for each layer."""
        return [KeyValueCache() for _ in self.decoder.layers]
