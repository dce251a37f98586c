"""A T5 of today's layers: RMS norms, gated feed-forward layers, rotary positions, grouped heads and windows.

By default like the encoder-decoder of Zhang et al., "Encoder-Decoder or Decoder-Only? Revisiting Encoder-Decoder Large
Language Model" (2025): pre-norm, SwiGLU, rotary positions in all attentions, of which the decoder's go on where the
input's end, and one matrix for both embeddings and the output. Its norms of queries and keys learn gains, as Qwen3's
do, and values and the attention's output have none.
"""

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
    """All three matrices, the last two or none of them are one."""

    config: ModernConfig

    def __init__(self, config: ModernConfig):
        rows, std, scale, tied = (
            config.padded_vocab_size,
            config.init_std,
            config.scale_embedding,
            config.tie_embeddings,
        )
        encoder, decoder, longest = config.encoder, config.decoder, config.max_positions
        layers = _block(config, encoder, 2 * encoder.num_layers), _block(config, decoder, 3 * decoder.num_layers)
        super().__init__(
            config,
            Embedding(rows, encoder.d_model, std),
            Encoder(config, layers[0], encoder.num_layers, as_far_on_both_sides, scale, longest),
            Decoder(config, layers[1], decoder.num_layers, encoder.d_model, scale, longest, config.cross_rotation),
            Head(decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=tied != "none",
            decoder_embedding=None if tied == "all" else Embedding(rows, decoder.d_model, std),
        )
