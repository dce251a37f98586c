"""Configs of the original Transformer and of BART, which has the same layers."""

from typing import Literal, Self

from pydantic import model_validator

from pretrain.models.config.base import Count, ModelConfig, Probability


class TransformerConfig(ModelConfig):
    """An encoder-decoder of Vaswani et al. (2017), section 3; each head has d_model / num_heads units."""

    training_only = ModelConfig.training_only | {"attention_dropout_rate", "activation_dropout_rate"}

    d_model: Count
    """Width of the embeddings and of every sublayer's output."""
    d_ff: Count
    """Width of the feed-forward layers."""
    num_heads: Count
    """Attention heads of a layer."""
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

    @property
    def d_kv(self) -> int:
        return self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}")
        return self


class VanillaConfig(TransformerConfig):
    """The Transformer as published. The decoder starts from padding."""

    family: Literal["vanilla"] = "vanilla"
    activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"
    label_smoothing: Probability = 0.1

    @model_validator(mode="after")
    def _sines_have_cosines(self) -> Self:
        if self.d_model % 2:
            raise ValueError(f"d_model: {self.d_model} is odd; sinusoidal positions need as many sines as cosines")
        return self


class BartConfig(TransformerConfig):
    """BART (Lewis et al. 2020). The decoder starts from the end mark, as in fairseq."""

    family: Literal["bart"] = "bart"
    activation: Literal["relu", "gelu", "gelu_tanh"] = "gelu"
    max_positions: Count = 1024
    """The longest input and the longest target, in tokens."""
    scale_embedding: bool = False
    """Multiply token vectors by √d_model."""

    @property
    def decoder_start_id(self) -> int:
        return self.eos_id
