"""The decoder-only model's config."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, ModelConfig
from pretrain.models.config.blocks import Heads, LocalAndGlobal, Norm


class DecoderOnlyConfig(LocalAndGlobal, Heads, ModelConfig):
    """A decoder-only model, by default like GPT-2 (Radford et al. 2019). With other settings it has the layers of
    Llama, Qwen3, Gemma 2 or Gemma 3: docs/explanation/models.md lists them."""

    family: Literal["decoder_only"] = "decoder_only"
    num_layers: Count
    """Layers of the model."""
    positions: Literal["learned", "rotary", "alibi", "sinusoidal"] = "learned"
    """How positions are encoded; GPT-2's are learned."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    """How the inputs of the objective `in_one_row`, and prompts, are read. `bidirectional`: their tokens see one
    another, as in a prefix LM (Raffel et al. 2020, section 3.2.1)."""
    max_positions: Count | None = None
    """The longest row with learned positions, in tokens. null with any other positions, which have no limit."""
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    """Whether the next token's position embedding is subtracted from the output, and a layer norm follows. As in the
    autoregressive encoder-decoder."""
    activation: Literal["gelu_tanh", "gelu", "relu", "swiglu", "geglu"] = "gelu_tanh"
    """Activation of the feed-forward layers. GPT-2's GELU is the tanh approximation. The last two are gated: `swiglu`
    by SiLU, `geglu` by that GELU."""
    biases: bool = True
    """Biases in linear layers and layer norms."""
    norm: Norm = "layer"
    """Kind of norms. `rms`: without means and biases. `rms_around_one`: the same, but gains are 1 + weight, as in
    Gemma."""
    norm_after: bool = False
    """A second norm in each sublayer: of its output, before it is added to the residual stream, as in Gemma 2."""
    qk_norm: bool = False
    """RMS norms of each head's queries and keys, as in Qwen3."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-5
    """Added to the variance in layer norms, and to the mean square in RMS norms."""
    attention_softcap: PositiveFloat | None = None
    """Attention logits stay within ± this: cap · tanh(logits / cap), as in Gemma 2. null: no limit."""
    output_softcap: PositiveFloat | None = None
    """The output's logits stay within ± this. null: no limit."""
    scale_embedding: bool = False
    """Multiply token vectors by √d_model."""
    tie_embeddings: bool = True
    """Embedding and output share one matrix."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all weights at the start. For matrices that end a residual branch it is divided by
    √(2 · num_layers)."""

    @model_validator(mode="after")
    def _heads_and_positions_fit(self) -> Self:
        if self.positions == "rotary" and self.d_kv % 2:
            name = "d_model / num_heads" if self.head_dim is None else "head_dim"
            raise ValueError(f"num_heads: rotary positions need heads of even width, but {name} is {self.d_kv}")
        if self.positions != "rotary" and (self.rope_base != 10_000.0 or self.window_rope_base is not None):
            raise ValueError(f"rope_base: needs rotary positions, not {self.positions} ones")
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("max_positions is missing: learned positions need it")
        if self.positions != "learned" and self.max_positions is not None:
            raise ValueError(f"max_positions: {self.positions} positions have no limit; leave it out")
        if self.positions != "learned" and self.subtract_positions != "none":
            raise ValueError(f"subtract_positions: needs learned positions, not {self.positions} ones")
        if self.prefix_attention == "bidirectional" and (self.sliding_window is not None or self.positions == "alibi"):
            raise ValueError(
                "prefix_attention: bidirectional goes with neither windows nor alibi, which look back alone"
            )
        return self
