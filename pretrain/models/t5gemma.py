"""T5Gemma: Zhang et al., "Encoder-Decoder Gemma: Improving the Quality-Efficiency Trade-Off via Adaptation" (2025).

Two stacks of Gemma 2's layers: norms before and after each sublayer, GeGLU, grouped heads, rotary self-attention that
sees a window in every other layer, and soft caps. Each stack has an embedding matrix; the decoder's is the output's
too. Cross-attention has no positions and sees the whole input. Where the authors' code and transformers differ, in the
encoder's window, this follows transformers.
"""

from pretrain.config.models import ModernConfig, StackConfig, T5Gemma2Config, T5GemmaConfig
from pretrain.functional.attention_bias import Window
from pretrain.models.layers import Embedding
from pretrain.models.loss import Head
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder, LayerConfig


def layer_config(
    config: T5GemmaConfig | T5Gemma2Config | ModernConfig, stack: StackConfig, branches: int = 1
) -> LayerConfig:
    """The settings of the layers of `stack`. The matrices that end its residual branches start smaller by
    √`branches`."""
    std = config.hidden_std(config.init_std)
    return LayerConfig(
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
        std=std,
        out_std=std * branches**-0.5,
    )


def encoder_window(tokens: int) -> Window:
    """`tokens` keys on each side of a query."""
    return Window(tokens, tokens)


class T5Gemma(EncoderDecoder):
    """Each stack has an embedding matrix; the decoder's is the output's too."""

    config: T5GemmaConfig

    def __init__(self, config: T5GemmaConfig):
        rows, std, encoder, decoder = config.padded_vocab_size, config.init_std, config.encoder, config.decoder
        super().__init__(
            config,
            Embedding(rows, encoder.d_model, std),
            Encoder(config, layer_config(config, encoder), encoder.num_layers, encoder_window),
            Decoder(config, layer_config(config, decoder), decoder.num_layers, encoder.d_model),
            Head(decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=True,
            decoder_embedding=Embedding(rows, decoder.d_model, std),
        )
