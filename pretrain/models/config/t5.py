"""T5's config."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pretrain.models.config.base import Count, ModelConfig


class T5Config(ModelConfig):
    """T5 (Raffel et al. 2020); v1.1 and v1.0 differ in `feed_forward` and `tie_embeddings` alone.

    The decoder starts from padding.
    """

    family: Literal["t5"] = "t5"
    d_model: Count
    d_kv: Count
    d_ff: Count
    num_heads: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    relative_attention_num_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32  # halved by sign, and by exactness
    relative_attention_max_distance: Count = 128
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    feed_forward: Literal["gated-gelu", "relu"] = "gated-gelu"
    tie_embeddings: bool = False

    @model_validator(mode="after")
    def _buckets_reach(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError("relative_attention_max_distance must exceed half of relative_attention_num_buckets")
        return self
