"""The config of the autoregressive encoder-decoder."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrain.models.config.base import Count, ModelConfig


class EmbeddingLossConfig(BaseModel):
    """How far the encoder's output may stray from the mean of the embeddings so far; part of training only.

    `kind`: `mse`, `cosine` (1 − (cos + 1) / 2) or `log_cosine` (−log((cos + 1) / 2)). `embedding_norm`: layer norm on
    the embeddings `before_mean` (the author's INIT), `after_mean` (AVG_CUM_SUM) or `none`. `encoder_norm`: layer norm
    on the encoder's output. `detach`: the side that gets no gradient; the norms on both sides always learn.

    With a norm that learns on each side the loss can fall without telling the encoder anything: gains shrink, or biases
    grow, until both sides agree. That is how it is defined, and what the published 4e-9 comes from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["mse", "cosine", "log_cosine"]
    coefficient: Annotated[float, Field(gt=0.0)] = 1.0
    embedding_norm: Literal["before_mean", "after_mean", "none"] = "before_mean"
    encoder_norm: bool = True
    detach: Literal["encoder_out", "embedding", "none"] = "encoder_out"


class AutoregressiveConfig(ModelConfig):
    """The autoregressive encoder-decoder (Yan 2024). What isn't set is off; the best published setting is in
    configs/models/autoregressive-yan2024.yaml.

    `d_ff`: by default 4 · `d_model`. `num_cross_heads`: by default 2 · `num_heads`; the width of all attention is
    `d_model`. `max_positions`: tokens of the longest row, for learned positions; rotary ones have no table and no end.
    `bias`: in linear layers and layer norms; `cross_attention_bias`: by default as `bias`. `order`: which attention is
    first in a decoder layer, `original` self-attention, `alternate` cross-attention. `bridge_norm`: layer norm before
    the linear map from encoder to decoder. `subtract_positions`: whether that of the next token is subtracted from the
    decoder's output (the author's YES_NO_LN and YES_LN), `add_positions`: whether it is added to the decoder's input.
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
        """Whether the table of positions has a row for the one after the last token's."""
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
                problems.append("rotary positions have no vectors that subtract_positions or add_positions could take")
            if self.max_positions is not None:
                problems.append("max_positions is the size of a table of learned positions; rotary ones have none")
            problems += [
                f"rotary positions turn pairs of dimensions, but {name} {heads} leave each head {self.d_model // heads}"
                for name, heads in (("num_heads", self.num_heads), ("num_cross_heads", self.cross_heads))
                if self.d_model % heads == 0 and self.d_model // heads % 2
            ]
        elif self.max_positions is None:
            problems.append("max_positions is missing: learned positions need the length of the longest row")
        if problems:
            raise ValueError("; ".join(problems))
        return self
