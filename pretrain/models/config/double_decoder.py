"""The config of the block-based double decoder."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, ModelConfig
from pretrain.models.config.blocks import Heads


class DoubleDecoderConfig(Heads, ModelConfig):
    """The block-based double decoder: two causal stacks, of which the second reads the first's states of earlier
    blocks."""

    family: Literal["double_decoder"] = "double_decoder"
    num_encoder_layers: Count
    """Layers of the encoder."""
    num_decoder_layers: Count
    """Layers of the decoder."""
    least_boundaries: Count = 2
    """The fewest boundaries between blocks that are drawn for a step."""
    most_boundaries: Count = 7
    """The most boundaries between blocks that are drawn for a step."""
    block_length: Count = 128
    """In generation, the tokens of a block: once it is full, the encoder reads it. Neither training nor evaluation uses
    it."""
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu"
    """Activation of the feed-forward layers. The last two are gated: `swiglu` by SiLU, `geglu` by the tanh
    approximation of GELU."""
    rope_base: PositiveFloat = 10_000.0
    """Base of the frequencies of rotary positions."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the mean square in RMS norms, and to the variance in the norm of the encoder's output."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all weights at the start. For matrices that end a residual branch it is divided by the
    root of the stack's number of branches."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.d_kv % 2:
            raise ValueError(f"head_dim: {self.d_kv} is odd; rotary positions need heads of even width")
        if self.least_boundaries > self.most_boundaries:
            raise ValueError(f"least_boundaries: {self.least_boundaries} is above most_boundaries")
        return self
