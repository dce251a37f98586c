"""The configs of T5Gemma and T5Gemma 2."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from pretrain.models.config.base import Count, ModelConfig, Probability, TokenId
from pretrain.models.config.blocks import Heads, LocalAndGlobal, Norm


class StackConfig(Heads):
    """The depth and the widths of a stack."""

    num_layers: Count
    """Layers of the stack."""

    @model_validator(mode="after")
    def _heads_are_even(self) -> Self:
        if self.d_kv % 2:
            raise ValueError(f"head_dim: {self.d_kv} is odd; rotary positions need heads of even width")
        return self


class TwoStacks(ModelConfig):
    """An encoder and a decoder with widths of their own."""

    encoder: StackConfig
    """The encoder."""
    decoder: StackConfig
    """The decoder."""

    @property
    def stacks(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "decoder": self.decoder}


class Gemma(LocalAndGlobal, ModelConfig):
    """What both versions have in common."""

    training_only = ModelConfig.training_only | {"attention_dropout_rate"}
    # what other families set
    activation: ClassVar[str] = "geglu"
    norm: ClassVar[Norm] = "rms_around_one"
    norm_after: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = False
    biases: ClassVar[bool] = False
    scale_embedding: ClassVar[bool] = True

    bos_id: TokenId | None = None
    """Id from which the decoder starts. Unless it is set, a run takes the corpus's BOS, or its EOS if there is
    none. null: padding."""
    sliding_window: Count | None = 4096
    """Tokens that a layer of the decoder with a window sees: the query's own and those before it. In the encoder of
    T5Gemma as many on each side, in that of T5Gemma 2 half as many. null: no layer has a window."""
    layer_norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    """Added to the mean square in norms."""
    attention_dropout_rate: Probability = 0.0
    """Probability of dropout of attention weights, in training only."""
    init_std: PositiveFloat = 0.02
    """The standard deviation of all matrices at the start."""

    @property
    def decoder_start_id(self) -> int:
        return self.pad_id if self.bos_id is None else self.bos_id


class T5GemmaConfig(TwoStacks, Gemma):
    """T5Gemma (Zhang et al. 2025): two stacks of Gemma 2's layers, which may differ in depth and width."""

    family: Literal["t5gemma"] = "t5gemma"
    full_attention_every: Count | None = 2
    """Every n-th layer sees the whole row, and the others a window. null: all have the window, if there is one."""
    attention_softcap: PositiveFloat | None = 50.0
    """Attention logits stay within ± this: cap · tanh(logits / cap). null: no limit."""
    output_softcap: PositiveFloat | None = 30.0
    """The output's logits stay within ± this. null: no limit."""


class T5Gemma2Config(StackConfig, Gemma):
    """The text part of T5Gemma 2 (Zhang et al. 2025): Gemma 3's layers, one attention to targets and inputs, and one
    matrix for both embeddings and the output. Both stacks have the same widths."""

    qk_norm = True
    attention_softcap: ClassVar[None] = None
    output_softcap: ClassVar[None] = None

    family: Literal["t5gemma2"] = "t5gemma2"
    num_layers: Count
    """Layers of each stack."""
    full_attention_every: Count | None = 6
    """Every n-th layer sees the whole row, and the others a window. null: all have the window, if there is one."""
    rope_base: PositiveFloat = 1_000_000.0
    """Base of the frequencies of rotary positions."""
    window_rope_base: PositiveFloat | None = 10_000.0
    """The base in layers with a window. null: `rope_base`."""
