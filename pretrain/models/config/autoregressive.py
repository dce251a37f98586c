"""The config of the autoregressive encoder-decoder."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrain.models.config.base import Count, ModelConfig


class EmbeddingLossConfig(BaseModel):
    """A loss, in training only, that pulls the encoder's output towards the mean of the embeddings so far.

    - `kind`: `mse`, `cosine` (1 − (cos + 1) / 2) or `log_cosine` (−log((cos + 1) / 2)).
    - `embedding_norm`: layer norm on the embeddings: `before_mean` (the author's INIT), `after_mean` (AVG_CUM_SUM) or
      `none`.
    - `encoder_norm`: whether the encoder's output has a layer norm.
    - `detach`: the side that gets no gradient. The norms on both sides always learn.

    With a learned norm on each side the loss can fall without training the encoder: gains shrink, or biases grow, until
    both sides agree. The loss is defined that way, and the published 4e-9 comes from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["mse", "cosine", "log_cosine"]
    coefficient: Annotated[float, Field(gt=0.0)] = 1.0
    embedding_norm: Literal["before_mean", "after_mean", "none"] = "before_mean"
    encoder_norm: bool = True
    detach: Literal["encoder_out", "embedding", "none"] = "encoder_out"


class AutoregressiveConfig(ModelConfig):
    """The autoregressive encoder-decoder (Yan 2024). Options are off by default; the best published setting is in
    configs/models/autoregressive-yan2024.yaml.

    - `d_ff`: by default 4 · `d_model`.
    - `num_cross_heads`: by default 2 · `num_heads`. All attention has the width `d_model`.
    - `max_positions`: the length of the longest row in tokens, for learned positions. Rotary ones have no limit.
    - `bias`: biases in linear layers and layer norms. `cross_attention_bias`: by default the same as `bias`.
    - `order`: which attention comes first in a decoder layer: `original`: self-attention, `alternate`: cross-attention.
    - `bridge_norm`: layer norm before the linear map from encoder to decoder.
    - `subtract_positions`: whether the next token's position embedding is subtracted from the decoder's output (the
      author's YES_NO_LN and YES_LN). `add_positions`: whether it is added to the decoder's input.
    """

    family: Literal["autoregressive"] = "autoregressive"
    d_model: Count
    num_heads: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    d_ff: Count | None = None
    num_cross_heads: Count | None = None
    positions: Literal["learned", "rotary"] = "learned"
    max_positions: Count | None = None
    bias: bool = False
    cross_attention_bias: bool | None = None
    order: Literal["original", "alternate"] = "original"
    bridge_norm: bool = False
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    add_positions: bool = False
    embedding_loss: EmbeddingLossConfig | None = None

    @property
    def cross_heads(self) -> int:
        return self.num_cross_heads or 2 * self.num_heads

    @property
    def reads_next_position(self) -> bool:
        """Whether the position table needs a row for the position after the last token."""
        return self.add_positions or self.subtract_positions != "none"

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        problems = [
            f"{name} {heads} doesn't divide d_model {self.d_model}"
            for name, heads in (("num_heads", self.num_heads), ("num_cross_heads", self.cross_heads))
            if self.d_model % heads
        ]
        if self.positions == "rotary":
            if self.reads_next_position:
                problems.append("subtract_positions and add_positions need learned positions, not rotary ones")
            if self.max_positions is not None:
                problems.append("max_positions is for learned positions; rotary ones have no table")
            problems += [
                f"rotary positions need heads of even width, but {name} {heads} makes heads of {self.d_model // heads}"
                for name, heads in (("num_heads", self.num_heads), ("num_cross_heads", self.cross_heads))
                if self.d_model % heads == 0 and self.d_model // heads % 2
            ]
        elif self.max_positions is None:
            problems.append("max_positions is missing: learned positions need the length of the longest row")
        if problems:
            raise ValueError("; ".join(problems))
        return self
