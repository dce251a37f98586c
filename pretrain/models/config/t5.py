"""T5's config."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pretrain.models.config.base import Count, ModelConfig


class T5Config(ModelConfig):
    """T5 (Raffel et al. 2020). v1.1 and v1.0 differ only in `feed_forward` and `tie_embeddings`.

    - `tie_embeddings`: embedding and output share one matrix.
    - `scale_outputs`: the decoder's output is multiplied by d_model^-½ before the output matrix; by default only with
      tied embeddings, as in v1.0.
    - `positions`: T5's own are relative. Learned ones are a table of `max_positions` per stack, which no sequence may
      exceed; they and sinusoids are added to the embeddings. Rotary positions and linear biases act in self-attention.

    The decoder starts from padding.
    """

    family: Literal["t5"] = "t5"
    d_model: Count
    d_kv: Count
    d_ff: Count
    num_heads: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    positions: Literal["relative", "rotary", "alibi", "sinusoidal", "learned"] = "relative"
    max_positions: Count | None = None
    relative_attention_num_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32  # halved by sign, and by exactness
    relative_attention_max_distance: Count = 128
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    feed_forward: Literal["gated-gelu", "relu"] = "gated-gelu"
    tie_embeddings: bool = False
    scale_outputs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _tied_outputs_are_scaled(cls, given: Any) -> Any:
        return {"scale_outputs": given.get("tie_embeddings", False), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _buckets_reach(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError("relative_attention_max_distance must exceed half of relative_attention_num_buckets")
        return self

    @model_validator(mode="after")
    def _positions_have_what_they_need(self) -> Self:
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("positions: learned positions need max_positions")
        if self.positions != "learned" and self.max_positions is not None:
            raise ValueError(f"max_positions is for learned positions, not for {self.positions} ones")
        of_relative = ("relative_attention_num_buckets", "relative_attention_max_distance")
        for name in of_relative if self.positions != "relative" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for relative positions, not for {self.positions} ones")
        if self.positions == "rotary" and self.d_kv % 2:
            raise ValueError(f"d_kv: {self.d_kv} is odd; rotary positions need an even d_kv")
        return self
