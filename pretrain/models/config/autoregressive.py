"""The config of the autoregressive encoder-decoder."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from data_pipeline.foundation.config_file import Section
from pretrain.models.config.base import Count, OneWidth


class EmbeddingLossConfig(Section):
    """A loss, in training only, that pulls the encoder's output towards the mean of the embeddings so far.

    With a learned norm on each side the loss can fall without training the encoder: gains shrink, or biases grow, until
    both sides agree. The loss is defined that way, and the published 4e-9 comes from it. `learned_norms: false` closes
    this way out; `cosine` without norms has no scale that could shrink.
    """

    kind: Literal["mse", "cosine", "log_cosine"]
    """The loss. `mse`: the mean squared difference. `cosine`: 1 − (cos + 1) / 2. `log_cosine`: −log((cos + 1) / 2)."""
    coefficient: Annotated[float, Field(gt=0.0)] = 1.0
    """Coefficient of the loss."""
    embedding_norm: Literal["before_mean", "after_mean", "none"] = "before_mean"
    """Where the embeddings get a layer norm. `before_mean` is the author's INIT, `after_mean` the author's
    AVG_CUM_SUM."""
    encoder_norm: bool = True
    """Layer norm on the encoder's output."""
    learned_norms: bool = True
    """Whether the norms on both sides have gains and biases, which learn. false: they only normalise."""
    detach: Literal["encoder_out", "embedding", "none"] = "encoder_out"
    """The side that gets no gradient, except in the gains and biases of its norm."""


class AutoregressiveConfig(OneWidth):
    """The autoregressive encoder-decoder (Yan 2024). All attention has the width `d_model`. Options are off by default;
    the best published setting is in configs/models/autoregressive-yan2024.yaml."""

    family: Literal["autoregressive"] = "autoregressive"
    num_encoder_layers: Count
    """Layers of the encoder."""
    num_decoder_layers: Count
    """Layers of the decoder."""
    d_ff: Count | None = None
    """Width of the feed-forward layers. null: 4 · d_model."""
    num_cross_heads: Count | None = None
    """Heads of the attention from decoder to encoder. null: 2 · num_heads."""
    positions: Literal["learned", "rotary"] = "learned"
    """How positions are encoded."""
    max_positions: Count | None = None
    """The longest row with learned positions, in tokens. null with rotary ones, which have no limit."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all matrices at the start. For those that end a residual branch it is divided by
    √(2 · the stack's layers)."""
    bias: bool = False
    """Biases in linear layers and layer norms."""
    cross_attention_bias: bool | None = None
    """Biases in the attention from decoder to encoder. null: as `bias`."""
    order: Literal["original", "alternate"] = "original"
    """Which attention comes first in a decoder layer. `original`: self-attention. `alternate`: attention to the
    encoder."""
    bridge_norm: bool = False
    """Layer norm before the linear map from encoder to decoder."""
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    """Whether the next token's position embedding is subtracted from the decoder's output. `without_norm` is the
    author's YES_NO_LN, `with_norm` YES_LN."""
    add_positions: bool = False
    """Add the next token's position embedding to the decoder's input."""
    embedding_loss: EmbeddingLossConfig | None = None
    """A loss that pulls the encoder's output towards the mean of the embeddings so far. null turns it off."""

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
