"""The decoder-only model's config."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pretrain.models.config.base import Count, HeadsShareWidth


class DecoderOnlyConfig(HeadsShareWidth):
    """A decoder alone, like GPT-2 (Radford et al. 2019). Embedding and output share one matrix."""

    family: Literal["decoder_only"] = "decoder_only"
    num_layers: Count
    """Layers of the model."""
    positions: Literal["learned", "rotary", "alibi", "sinusoidal"] = "learned"
    """How positions are encoded; GPT-2's are learned."""
    max_positions: Count | None = None
    """The longest row with learned positions, in tokens. null with any other positions, which have no limit."""
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    """Whether the next token's position embedding is subtracted from the output, and a layer norm follows. As in the
    autoregressive encoder-decoder."""
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    """Activation of the feed-forward layers. GPT-2's GELU is the tanh approximation."""
    biases: bool = True
    """Biases in linear layers and layer norms."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-5
    """Added to the variance in layer norms."""

    @model_validator(mode="after")
    def _heads_and_positions_fit(self) -> Self:
        if self.positions == "rotary" and self.d_kv % 2:
            raise ValueError(
                f"num_heads: rotary positions need heads of even width, but d_model / num_heads is {self.d_kv}"
            )
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("max_positions is missing: learned positions need it")
        if self.positions != "learned" and self.max_positions is not None:
            raise ValueError(f"max_positions: {self.positions} positions have no limit; leave it out")
        if self.positions != "learned" and self.subtract_positions != "none":
            raise ValueError(f"subtract_positions: needs learned positions, not {self.positions} ones")
        return self
