"""A T5 of today's layers: RMS norms, gated feed-forward layers, rotary positions, grouped heads and windows.

By default like the encoder-decoder of Zhang et al., "Encoder-Decoder or Decoder-Only? Revisiting Encoder-Decoder Large
Language Model" (2025): pre-norm, SwiGLU, rotary positions in all attentions, of which the decoder's go on where the
input's end, and one matrix for both embeddings and the output. Its norms of queries and keys learn gains, as Qwen3's
do, and values and the attention's output have none.
"""

from torch import Tensor

from pretrain.models.blocks import Block
from pretrain.models.config.modern import ModernConfig
from pretrain.models.config.t5gemma import StackConfig
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import Embedding
from pretrain.models.loss_head import Head
from pretrain.models.stacks import Decoder, Encoder
from pretrain.models.visibility import Window


def _block(config: ModernConfig, stack: StackConfig, branches: int) -> Block:
    return Block(
        stack,
        config.activation,
        config.norm,
        config.layer_norm_epsilon,
        norm_after=config.norm_after,
        qk_norm=config.qk_norm,
        biases=config.biases,
        attention_softcap=config.attention_softcap,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        activation_dropout_rate=config.dropout_rate,
        std=config.hidden_std(config.init_std),
        out_std=config.hidden_std(config.init_std) * branches**-0.5,
    )


def as_far_on_both_sides(tokens: int) -> Window:
    """The encoder's window: what the decoder sees before a query, and as much after it."""
    return Window(tokens - 1, tokens - 1)


class Modern(EncoderDecoder):
    """`embedding` is the encoder's matrix; `decoder_embedding` the decoder's, unless all are one."""

    config: ModernConfig

    def __init__(self, config: ModernConfig):
        rows, std, tied, scale = (
            config.padded_vocab_size,
            config.init_std,
            config.tie_embeddings,
            config.scale_embedding,
        )
        of_inputs, of_targets = config.encoder, config.decoder
        encoder = _block(config, of_inputs, 2 * of_inputs.num_layers)
        decoder = _block(config, of_targets, 3 * of_targets.num_layers)
        super().__init__(
            config,
            Embedding(rows, of_inputs.d_model, std),
            Encoder(config, encoder, of_inputs.num_layers, as_far_on_both_sides, scale, config.max_positions),
            Decoder(
                config,
                decoder,
                of_targets.num_layers,
                of_inputs.d_model,
                scale,
                config.max_positions,
                config.cross_rotation,
            ),
            Head(of_targets.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=tied == "all",
        )
        self.decoder_embedding = None if tied == "all" else Embedding(rows, of_targets.d_model, std)
        if self.decoder_embedding is not None and tied == "output":
            self.lm_head.weight = self.decoder_embedding.weight  # shared: each module uses it only in its own forward

    def embedded_targets(self, ids: Tensor) -> Tensor:
        return (self.decoder_embedding or self.embedding)(ids)

    def embedded(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.decoder_embedding is None:
            return super().embedded(inputs, targets)
        return self.embedding(inputs), self.decoder_embedding(targets)
