"""The `model:` section of a run file with `family: double_decoder`. No torch here: a launcher reads settings too."""

from typing import Any, ClassVar, Literal, Self

from pydantic import PositiveFloat, model_validator

from pretrain.config.model_config import AnyActivation, Count, Depths, ModelConfig, RotaryHeads


class DoubleDecoderConfig(Depths, RotaryHeads, ModelConfig):
    """The block-based double decoder: two causal stacks. The second stack attends to the first stack's hidden states of
    earlier blocks."""

    offers: ClassVar[dict[str, Any]] = {
        "model": "double_decoder.model.DoubleDecoder",
        "objectives": ("causal_lm", "causal_infilling", "in_one_row"),
        "generates": "continuations",
    }

    family: Literal["double_decoder"] = "double_decoder"
    least_boundaries: Count = 2
    """Minimum number of block boundaries that are drawn for a step."""
    most_boundaries: Count = 7
    """Maximum number of block boundaries that are drawn for a step."""
    block_length: Count = 128
    """Tokens of a block in generation: the encoder reads a block once it is full. Training and evaluation don't use
    this key."""
    activation: AnyActivation = "gelu"
    """Activation of the feed-forward layers. `swiglu` and `geglu` are gated, by SiLU and by the tanh approximation of
    GELU."""
    rope_base: PositiveFloat = 10_000.0
    """Base of the rotary frequencies (RoPE theta)."""
    layer_norm_epsilon: PositiveFloat = 1e-6
    """Added to the mean square in RMS norms, and to the variance in the norm of the encoder's output."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Matrices that end a residual branch have this divided by the square
    root of the stack's number of branches."""

    @model_validator(mode="after")
    def _boundaries_are_in_order(self) -> Self:
        if self.least_boundaries > self.most_boundaries:
            raise ValueError(f"least_boundaries: {self.least_boundaries} is above most_boundaries")
        return self
