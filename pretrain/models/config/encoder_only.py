"""The encoder-only model's config."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pretrain.models.config.base import Count, ModelConfig


class EncoderOnlyConfig(ModelConfig):
    """An encoder alone, like BERT (Devlin et al. 2018).

    With `next_sentence`, the model also predicts whether the second text follows the first. RoBERTa has neither that
    nor token types: `next_sentence: false`, `num_token_types: 0`.
    """

    family: Literal["encoder_only"] = "encoder_only"
    d_model: Count
    d_ff: Count
    num_heads: Count
    num_layers: Count
    max_positions: Count = 512
    num_token_types: Annotated[int, Field(ge=0)] = 2
    next_sentence: bool = True
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-12

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads_and_token_types_fit(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}")
        if self.next_sentence and self.num_token_types < 2:
            raise ValueError("num_token_types: next_sentence needs two token types, one for each text")
        return self
