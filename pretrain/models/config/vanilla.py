"""The vanilla Transformer's config, and the settings that BART shares with it."""

from typing import ClassVar, Literal, Self

from pydantic import PositiveFloat, model_validator

from pretrain.models.config.base import Count, HeadsShareWidth, ModelConfig, Probability


class PostNormConfig(HeadsShareWidth):
    """An encoder-decoder of Vaswani et al. (2017), section 3; each head has d_model / num_heads units."""

    training_only = ModelConfig.training_only | {"attention_dropout_rate", "activation_dropout_rate"}

    num_encoder_layers: Count
    """Layers of the encoder."""
    num_decoder_layers: Count
    """Layers of the decoder."""
    activation: Literal["relu", "gelu", "gelu_tanh"]
    """Activation of the feed-forward layers."""
    dropout_rate: Probability = 0.1
    """Probability of dropout of embeddings and every sublayer's output, in training only."""
    attention_dropout_rate: Probability = 0.0
    """Probability of dropout of attention weights, in training only."""
    activation_dropout_rate: Probability = 0.0
    """Probability of dropout of the hidden units of feed-forward layers, in training only."""


class VanillaConfig(PostNormConfig):
    """The Transformer as published. The decoder starts from padding."""

    scale_embedding: ClassVar[bool] = True

    family: Literal["vanilla"] = "vanilla"
    activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"
    label_smoothing: Probability = 0.1
    init_output_std: PositiveFloat = 1.0
    """The standard deviation of the first logits: the embedding matrix starts with this times d_model^-½. 1 is the
    authors' value; with 0.5 the first loss is lower, about ln V + ⅛, and token vectors start half as large beside
    the sinusoids."""

    @model_validator(mode="after")
    def _sines_have_cosines(self) -> Self:
        if self.d_model % 2:
            raise ValueError(f"d_model: {self.d_model} is odd; sinusoidal positions need as many sines as cosines")
        return self
