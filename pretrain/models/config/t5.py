"""T5's config."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, OneWidth


class T5Config(OneWidth):
    """T5 (Raffel et al. 2020). v1.1 and v1.0 differ only in `feed_forward` and `tie_embeddings`. The decoder starts
    from padding."""

    family: Literal["t5"] = "t5"
    d_kv: Count
    """Width of an attention head."""
    d_ff: Count
    """Width of the feed-forward layers."""
    num_encoder_layers: Count
    """Layers of the encoder."""
    num_decoder_layers: Count
    """Layers of the decoder."""
    positions: Literal["relative", "rotary", "alibi", "sinusoidal", "learned"] = "relative"
    """How positions are encoded; T5's own are relative. Rotary positions and alibi's linear biases act in
    self-attention; the last two are added to the embeddings."""
    max_positions: Count | None = None
    """The longest input and the longest target with learned positions, in tokens. null with any other positions."""
    relative_attention_num_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    """Buckets of relative positions; in the encoder, half of them for each direction. Half of a direction's stand for
    one distance each."""
    relative_attention_max_distance: Count = 128
    """The distance, in tokens, from which all relative positions share a bucket."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the mean square in norms."""
    feed_forward: Literal["gated-gelu", "relu"] = "gated-gelu"
    """Kind of feed-forward layers: v1.1's or v1.0's."""
    tie_embeddings: bool = False
    """Embedding and output share one matrix, as in v1.0."""
    scale_outputs: bool = False
    """Multiply the decoder's output by d_model^-½ before the output matrix. By default true with tied embeddings, as in
    v1.0."""
    init_output_std: PositiveFloat = 1.0
    """The standard deviation of the first logits. With T5's own, 1, the first loss is ln V + ½, and more with tied
    embeddings, which make the decoder predict its own input at first. With 0.5 it is about ln V + ⅛."""

    @property
    def logits_multiplier(self) -> float:
        """Scaled outputs have lost the factor d_model^-½ already, which the base width has as well."""
        return self.widening**-0.5 if self.scale_outputs else 1 / self.widening

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
        names = ("relative_attention_num_buckets", "relative_attention_max_distance")
        for name in names if self.positions != "relative" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for relative positions, not for {self.positions} ones")
        if self.positions == "rotary" and self.d_kv % 2:
            raise ValueError(f"d_kv: {self.d_kv} is odd; rotary positions need an even d_kv")
        return self
