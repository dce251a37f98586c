"""The encoder-only model's config."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, HeadsShareWidth


class EncoderOnlyConfig(HeadsShareWidth):
    """An encoder-only model like BERT (Devlin et al. 2018). RoBERTa has `next_sentence: false` and `num_token_types:
    0`."""

    family: Literal["encoder_only"] = "encoder_only"
    num_layers: Count
    """Layers of the model."""
    max_positions: Count = 512
    """The longest input, in tokens."""
    num_token_types: Annotated[int, Field(ge=0)] = 2
    """Token types, which tell the two texts of a row apart. 0: none."""
    next_sentence: bool = True
    """Also predict whether the second text of a row follows the first."""
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    """Activation of the feed-forward layers."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all matrices at the start."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-12
    """Added to the variance in layer norms."""

    @model_validator(mode="after")
    def _heads_and_token_types_fit(self) -> Self:
        if self.next_sentence and self.num_token_types < 2:
            raise ValueError("num_token_types: next_sentence needs two token types, one for each text")
        return self
