"""A T5 of today's layers: RMS norms, gated feed-forward layers, rotary positions, grouped heads and windows.

By default like the encoder-decoder of Zhang et al., "Encoder-Decoder or Decoder-Only? Revisiting Encoder-Decoder Large
Language Model" (2025): pre-norm, SwiGLU, rotary positions in all attentions, of which the decoder's go on where the
input's end, and one matrix for both embeddings and the output. Its norms of queries and keys learn gains, as Qwen3's
do, and values and the attention's output have none.
"""

from pretrain.config.models import ModernConfig
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import Embedding
from pretrain.models.loss_head import Head
from pretrain.models.stacks import Decoder, Encoder, block_of
from pretrain.models.visibility import Window


def as_far_on_both_sides(tokens: int) -> Window:
    """The encoder's window: what the decoder sees before a query, and as much after it."""
    return Window(tokens - 1, tokens - 1)


class Modern(EncoderDecoder):
    """All three matrices, the last two or none of them are one."""

    config: ModernConfig

    def __init__(self, config: ModernConfig):
        rows, std, tied = config.padded_vocab_size, config.init_std, config.tie_embeddings
        encoder, decoder = config.encoder, config.decoder
        blocks = block_of(config, encoder, 2 * encoder.num_layers), block_of(config, decoder, 3 * decoder.num_layers)
        super().__init__(
            config,
            Embedding(rows, encoder.d_model, std),
            Encoder(config, blocks[0], encoder.num_layers, as_far_on_both_sides),
            Decoder(config, blocks[1], decoder.num_layers, encoder.d_model),
            Head(decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=tied != "none",
            decoder_embedding=None if tied == "all" else Embedding(rows, decoder.d_model, std),
        )
