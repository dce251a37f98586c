"""T5Gemma: Zhang et al., "Encoder-Decoder Gemma: Improving the Quality-Efficiency Trade-Off via Adaptation" (2025).

Two stacks of Gemma 2's layers: norms before and after each sublayer, GeGLU, grouped heads, rotary self-attention that
sees a window in every other layer, and soft caps. Each stack has an embedding matrix; the decoder's is the output's
too. Cross-attention has no positions and sees the whole input. Where the authors' code and transformers differ, in the
encoder's window, this follows transformers.
"""

from pretrain.config.models import T5GemmaConfig
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import Embedding
from pretrain.models.loss_head import Head
from pretrain.models.stacks import Decoder, Encoder, block_of
from pretrain.models.visibility import Window


def on_each_side(tokens: int) -> Window:
    """The encoder's window."""
    return Window(tokens, tokens)


class T5Gemma(EncoderDecoder):
    """Each stack has an embedding matrix; the decoder's is the output's too."""

    config: T5GemmaConfig

    def __init__(self, config: T5GemmaConfig):
        rows, std, encoder, decoder = config.padded_vocab_size, config.init_std, config.encoder, config.decoder
        super().__init__(
            config,
            Embedding(rows, encoder.d_model, std),
            Encoder(config, block_of(config, encoder), encoder.num_layers, on_each_side),
            Decoder(config, block_of(config, decoder), decoder.num_layers, encoder.d_model),
            Head(decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=True,
            decoder_embedding=Embedding(rows, decoder.d_model, std),
        )
