"""The vanilla Transformer: Vaswani et al., "Attention Is All You Need" (2017).

A post-norm encoder-decoder, LayerNorm(x + Dropout(Sublayer(x))), with sinusoidal positions and one matrix for both
embeddings and the output. Its layers are BART's too.
"""

from typing import Any

from pretrain.config.models import PostNormConfig, VanillaConfig
from pretrain.models.layers import Embedding, LayerConfig
from pretrain.models.model import Head
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder
from pretrain.models.state_dict_adapter import own_code


def post_norm_layer(config: PostNormConfig, **stds: Any) -> LayerConfig:
    """The settings of post-norm layers. `stds`: initial standard deviations that replace the config's."""
    return LayerConfig.of(config, norm="layer", layer_norm_epsilon=1e-5, biases=True, post_norm=True, **stds)


class Vanilla(EncoderDecoder):
    """The Transformer as published."""

    def __init__(self, config: VanillaConfig):
        rows = config.padded_vocab_size
        d_model = config.d_model
        std = config.init_output_std * config.base_width**-0.5
        embedding = Embedding(rows, d_model, std)
        lm_head = Head(d_model, rows, std, multiplier=config.logits_multiplier)
        # Glorot's √(2 / (inputs + outputs)), as in the authors' code
        layer = post_norm_layer(config, std=d_model**-0.5, feed_forward_std=(2 / (d_model + config.d_ff)) ** 0.5)
        encoder = Encoder(config, layer, config.num_encoder_layers)
        decoder = Decoder(config, layer, config.num_decoder_layers)
        super().__init__(config, embedding, encoder, decoder, lm_head, tied=True)


HF_MODELS = (
    own_code(
        VanillaConfig,
        "encoder_decoder",
        "vanilla_encoder_decoder",
        "AutoModelForSeq2SeqLM",
        "VanillaForConditionalGeneration",
        fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
        ends=True,
        last_norm=lambda config: f"decoder.layers.{config.num_decoder_layers - 1}.feed_forward_norm",
    ),
)
