"""The config of the autoregressive encoder-decoder."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from data_pipeline.foundation.config_file import Section
from pretrain.models.config.base import Count, OneWidth


class EmbeddingLossConfig(Section):
    """A loss, in training only, that pulls the encoder's output towards an aggregate of the embeddings so far.

    With a learned norm on each side the loss can fall without training the encoder: gains shrink, or biases grow, until
    both sides agree. The loss is defined that way, and the published 4e-9 comes from it. `learned_norms: false` closes
    this way out; `cosine` without norms has no scale that could shrink.
    """

    kind: Literal["mse", "l1", "cosine", "log_cosine", "kl", "contrastive"]
    """The disaffinity score. `mse`, `l1`: the mean squared or absolute difference. `cosine`: 1 − (cos + 1) / 2.
    `log_cosine`: −log((cos + 1) / 2). `kl`: the divergence KL(aggregate ‖ output) of softmaxes over the units.
    `contrastive`: InfoNCE (van den Oord et al. 2018), the cross-entropy of a position's own output among those so far,
    with cosine / 0.1 as logits."""
    aggregation: Literal["mean", "convolution", "matrix"] = "mean"
    """How the embeddings so far are aggregated. `mean` is the author's. `convolution`: a learned one, causal and
    depthwise, over `kernel_size` tokens. `matrix`: a learned weight for each pair of positions, which needs
    `max_positions`. Both start as means."""
    kernel_size: Count | None = None
    """Tokens that the convolution spans. null with any other aggregation."""
    coefficient: Annotated[float, Field(gt=0.0)] = 1.0
    """Coefficient of the loss."""
    embedding_norm: Literal["before_mean", "after_mean", "none"] = "before_mean"
    """Whether the embeddings get a layer norm before or after the aggregation. `before_mean` is the author's INIT,
    `after_mean` the author's AVG_CUM_SUM."""
    encoder_norm: bool = True
    """Layer norm on the encoder's output."""
    learned_norms: bool = True
    """Whether the norms on both sides have gains and biases, which learn. false: they only normalise."""
    detach: Literal["encoder_out", "embedding", "none"] = "encoder_out"
    """The side that gets no gradient, except in the gains and biases of its norm."""

    @model_validator(mode="after")
    def _has_a_kernel(self) -> Self:
        if (self.aggregation == "convolution") != (self.kernel_size is not None):
            raise ValueError(
                f"kernel_size is {self.kernel_size}: the aggregation `convolution` needs one, no other has it"
            )
        return self


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
    """The longest row, in tokens. null if nothing limits it: rotary positions, without `add_positions` and a `matrix`
    in the embedding loss."""
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
    author's YES_NO_LN, `with_norm` YES_LN. With rotary positions it needs `add_positions`."""
    add_positions: bool = False
    """Add the next token's position embedding to the decoder's input. With rotary positions, nothing else reads the
    table of position embeddings."""
    embedding_loss: EmbeddingLossConfig | None = None
    """A loss that pulls the encoder's output towards an aggregate of the embeddings so far. null turns it off."""

    @property
    def cross_heads(self) -> int:
        return self.num_cross_heads or 2 * self.num_heads

    @property
    def position_rows(self) -> int:
        """Rows of the table of position embeddings, 0 without one. The position after the last token may have one."""
        reads_next = self.add_positions or self.subtract_positions != "none"
        if self.max_positions is None or not (self.positions == "learned" or reads_next):
            return 0
        return self.max_positions + reads_next

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        problems = [
            f"{name} {heads} doesn't divide d_model {self.d_model}"
            for name, heads in (("num_heads", self.num_heads), ("num_cross_heads", self.cross_heads))
            if self.d_model % heads
        ]
        matrix = self.embedding_loss is not None and self.embedding_loss.aggregation == "matrix"
        if self.positions == "learned" or self.add_positions or matrix:
            if self.max_positions is None:
                problems.append("max_positions is missing: what is learned for each position needs the longest row")
        elif self.max_positions is not None:
            problems.append("max_positions is for learned positions; rotary ones have no table")
        if self.positions == "rotary":
            if self.subtract_positions != "none" and not self.add_positions:
                problems.append(
                    "subtract_positions: rotary positions add nothing to the embeddings, so there is nothing to "
                    "subtract. With add_positions: true, the position embedding that the decoder's input gets is "
                    "subtracted from its output"
                )
            problems += [
                f"rotary positions need heads of even width, but {name} {heads} makes heads of {self.d_model // heads}"
                for name, heads in (("num_heads", self.num_heads), ("num_cross_heads", self.cross_heads))
                if self.d_model % heads == 0 and self.d_model // heads % 2
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self
