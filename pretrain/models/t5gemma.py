"""T5Gemma: Zhang et al., "Encoder-Decoder Gemma: Improving the Quality-Efficiency Trade-Off via Adaptation" (2025).

Two stacks of Gemma 2's layers: norms before and after each sublayer, GeGLU, grouped heads, rotary self-attention that
sees a window in every other layer, and soft caps. Each stack has an embedding matrix; the decoder's is the output's
too. Cross-attention has no positions and sees the whole input. Where the authors' code and transformers differ, in the
encoder's window, this follows transformers.
"""

from pretrain.models.blocks import Block
from pretrain.models.config.t5gemma import StackConfig, T5GemmaConfig
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import Embedding
from pretrain.models.loss_head import Head
from pretrain.models.stacks import Decoder, Encoder
from pretrain.models.visibility import Window


def _block(config: T5GemmaConfig, stack: StackConfig) -> Block:
    return Block(
        stack,
        "geglu",
        "rms_around_one",
        config.layer_norm_epsilon,
        norm_after=True,
        attention_softcap=config.attention_softcap,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        activation_dropout_rate=config.dropout_rate,
        std=config.hidden_std(config.init_std),
    )


def on_each_side(tokens: int) -> Window:
    """The encoder's window."""
    return Window(tokens, tokens)


class T5Gemma(EncoderDecoder):
    """Each stack has an embedding matrix; the decoder's is the output's too."""

    config: T5GemmaConfig

    def __init__(self, config: T5GemmaConfig):
        rows, std, widths = config.padded_vocab_size, config.init_std, (config.encoder, config.decoder)
        encoder, decoder = (_block(config, stack) for stack in widths)
        super().__init__(
            config,
            Embedding(rows, config.encoder.d_model, std),
            Encoder(config, encoder, config.encoder.num_layers, on_each_side, scale_embedding=True),
            Decoder(config, decoder, config.decoder.num_layers, config.encoder.d_model, scale_embedding=True),
            Head(config.decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=True,
            decoder_embedding=Embedding(rows, config.decoder.d_model, std),
        )
