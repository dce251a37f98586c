"""The config of an encoder-decoder of today's layers."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, ModelConfig, Probability
from pretrain.models.config.blocks import LocalAndGlobal, Norm
from pretrain.models.config.t5gemma import TwoStacks


class ModernConfig(TwoStacks, LocalAndGlobal):
    """A T5 of today's layers, by default like RedLLM's encoder-decoder (Zhang et al. 2025). The decoder starts from
    padding."""

    training_only = ModelConfig.training_only | {"attention_dropout_rate"}

    family: Literal["modern"] = "modern"
    sliding_window: Count | None = None
    """Tokens that a layer of the decoder with a window sees: the query's own and those before it. The encoder's see as
    far in both directions. null: no layer has a window."""
    activation: Literal["swiglu", "geglu", "gelu_tanh", "gelu", "relu"] = "swiglu"
    """Activation of the feed-forward layers. The first two are gated: `swiglu` by SiLU, `geglu` by the tanh
    approximation of GELU."""
    norm: Norm = "rms"
    """Kind of norms. `layer`: layer norms, as in GPT-2. `rms`: without means and biases. `rms_around_one`: the same,
    but gains are 1 + weight, as in Gemma."""
    biases: bool = False
    """Biases in linear layers and layer norms."""
    norm_after: bool = False
    """A second norm in each sublayer: of its output, before it is added to the residual stream."""
    qk_norm: bool = True
    """RMS norms of each head's queries and keys, in all attentions."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions are encoded in self-attention. `learned`: each stack has a table, which counts from 0."""
    max_positions: Count | None = None
    """The longest input and the longest target with learned positions, in tokens. null with rotary ones, which have no
    limit."""
    cross_rotation: bool = True
    """Rotary positions in cross-attention too; the decoder's positions then go on where the input's end."""
    attention_softcap: PositiveFloat | None = None
    """Attention logits stay within ± this: cap · tanh(logits / cap). null: no limit."""
    output_softcap: PositiveFloat | None = None
    """The output's logits stay within ± this. null: no limit."""
    tie_embeddings: Literal["all", "output", "none"] = "all"
    """Which matrices are one. `all`: both embeddings and the output. `output`: the decoder's embedding and the output.
    `none`: none of the three."""
    scale_embedding: bool = False
    """Multiply token vectors by √d_model."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the mean square in norms."""
    attention_dropout_rate: Probability = 0.0
    """Probability of dropout of attention weights, in training only."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all weights at the start. For matrices that end a residual branch it is divided by the
    root of the stack's number of branches."""

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
        if self.positions == "rotary":
            if self.max_positions is not None:
                raise ValueError("max_positions: rotary positions have no limit; leave it out")
            return self
        if self.max_positions is None:
            raise ValueError("max_positions is missing: learned positions need it")
        if self.cross_rotation:
            raise ValueError("cross_rotation: needs rotary positions, not learned ones; set it to false")
        if self.rope_base != 10_000.0 or self.window_rope_base is not None:
            raise ValueError("rope_base: needs rotary positions, not learned ones")
        return self

    @model_validator(mode="after")
    def _one_matrix_has_one_width(self) -> Self:
        if self.tie_embeddings == "all" and self.encoder.d_model != self.decoder.d_model:
            raise ValueError(
                f"tie_embeddings: one matrix can't be {self.encoder.d_model} wide in the encoder and "
                f"{self.decoder.d_model} in the decoder; use output or none"
            )
        return self
