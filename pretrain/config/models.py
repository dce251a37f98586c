"""The `model:` section of a run file: one class per model family. `pretrain.config.model_config` has what families
share."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from data_pipeline.base.config_file import Section
from data_pipeline.base.packages import offered
from pretrain.config.model_config import (
    Activation,
    AnyActivation,
    Count,
    Depths,
    HeadsShareWidth,
    Layers,
    LocalAndGlobal,
    ModelConfig,
    ModernLayers,
    Norm,
    OneWidth,
    Positions,
    Probability,
    RotaryHeads,
    Widths,
)


class T5Config(Positions, Depths, Widths, ModelConfig):
    """T5 (Raffel et al. 2020). Versions 1.1 and 1.0 differ only in `feed_forward` and `tie_embeddings`. The decoder
    starts from padding."""

    family: Literal["t5"] = "t5"
    d_kv: Count
    """Width of an attention head."""
    positions: Literal["relative", "rotary", "alibi", "sinusoidal", "learned"] = "relative"
    """How positions are encoded; T5's are `relative`. `rotary` and `alibi` (linear biases) act in self-attention;
    `sinusoidal` and `learned` positions are added to the embeddings."""
    relative_attention_num_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    """Number of buckets of relative positions. The encoder uses half of them for each direction. In a direction, half
    of the buckets stand for a single distance."""
    relative_attention_max_distance: Count = 128
    """Distance, in tokens, from which all relative positions share a bucket."""
    relative_attention_in_every_layer: bool = False
    """Each layer has relative positions of its own, as in umT5. Default: the layers of a stack share theirs, as in T5
    and mT5."""
    layer_norm_epsilon: PositiveFloat = 1e-6
    """Added to the variance in layer norms, and to the mean square in RMS norms."""
    feed_forward: Literal["gated-gelu", "gated-silu", "relu"] = "gated-gelu"
    """Kind of feed-forward layers: `gated-gelu` as in v1.1, `gated-silu` as in UL2, or `relu` as in v1.0."""
    tie_embeddings: bool = False
    """Tie the embedding and the output matrix."""
    scale_outputs: bool = False
    """Multiply the decoder's output by d_model^-½ before the output matrix. Default: true with tied embeddings, as in
    v1.0."""
    init_output_std: PositiveFloat = 1.0
    """Standard deviation of the initial logits. With T5's own, 1, the first loss is ln V + ½. With tied embeddings it
    is higher, because the decoder predicts its own input at first. With 0.5 it is about ln V + ⅛."""

    @property
    def logits_multiplier(self) -> float:
        """Scaled outputs have a factor d_model^-½ already, also at the base width."""
        return self.widening**-0.5 if self.scale_outputs else 1 / self.widening

    @model_validator(mode="before")
    @classmethod
    def _tied_outputs_are_scaled(cls, values: Any) -> Any:
        return {"scale_outputs": values.get("tie_embeddings", False), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _buckets_reach(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError("relative_attention_max_distance must exceed half of relative_attention_num_buckets")
        return self

    @model_validator(mode="after")
    def _positions_have_what_they_need(self) -> Self:
        names = [name for name in type(self).model_fields if name.startswith("relative_attention_")]
        for name in names if self.positions != "relative" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for relative positions, not for {self.positions} ones")
        if self.positions == "rotary" and self.d_kv % 2:
            raise ValueError(f"d_kv: {self.d_kv} is odd; rotary positions need an even d_kv")
        return self


class PostNormConfig(Depths, HeadsShareWidth, ModelConfig):
    """An encoder-decoder of Vaswani et al. (2017), section 3. Each head has d_model / num_heads units."""

    activation: Activation
    """Activation of the feed-forward layers."""
    dropout_rate: Probability = 0.1
    """Dropout probability of embeddings and of the output of every sublayer, in training only."""
    attention_dropout_rate: Probability = 0.0
    """Dropout probability of attention weights, in training only."""
    activation_dropout_rate: Probability = 0.0
    """Dropout probability of the hidden units of feed-forward layers, in training only."""


class VanillaConfig(PostNormConfig):
    """The Transformer as published. The decoder starts from padding."""

    positions: ClassVar[str] = "sinusoidal"
    scale_embedding: ClassVar[bool] = True

    family: Literal["vanilla"] = "vanilla"
    activation: Activation = "relu"
    label_smoothing: Probability = 0.1
    init_output_std: PositiveFloat = 1.0
    """Standard deviation of the initial logits: the embedding matrix is initialized with this times d_model^-½. 1 is
    the authors' value. With 0.5 the first loss is lower, about ln V + ⅛, and token embeddings are half as large beside
    the sinusoids."""

    @model_validator(mode="after")
    def _sines_have_cosines(self) -> Self:
        if self.d_model % 2:
            raise ValueError(f"d_model: {self.d_model} is odd; sinusoidal positions need as many sines as cosines")
        return self


class BartConfig(PostNormConfig):
    """BART (Lewis et al. 2020). The decoder starts from EOS, as in fairseq."""

    positions: ClassVar[str] = "learned"

    family: Literal["bart"] = "bart"
    activation: Activation = "gelu"
    max_positions: Count = 1024
    """Maximum length of inputs and of targets, in tokens."""
    scale_embedding: bool = False
    """Multiply token embeddings by √d_model."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. The default suits widths of 768 and more; narrower models learn faster
    with 1/√d_model."""

    @property
    def decoder_start_id(self) -> int:
        return self.eos_id


class StackConfig(RotaryHeads):
    """The depth and the widths of a stack."""

    num_layers: Layers
    """Number of layers of a stack."""


class TwoStacks(ModelConfig):
    """An encoder and a decoder, each with its own depth and widths."""

    encoder: StackConfig
    """The encoder."""
    decoder: StackConfig
    """The decoder."""

    @property
    def stacks(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "decoder": self.decoder}


class Gemma(LocalAndGlobal, ModelConfig):
    """The settings that both versions of T5Gemma have."""

    # constants, where other families have settings
    activation: ClassVar[str] = "geglu"
    norm: ClassVar[Norm] = "rms_around_one"
    norm_after: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = False
    biases: ClassVar[bool] = False
    scale_embedding: ClassVar[bool] = True

    bos_id: NonNegativeInt | None = None
    """Id that the decoder starts from. Unless it is set, a run takes the corpus's BOS, or its EOS if there is no BOS.
    null: padding."""
    sliding_window: Count | None = 4096
    """Tokens that a query attends to in a decoder layer with a sliding window: itself and those before it. The
    encoder's windows have as many tokens on each side in T5Gemma, half as many in T5Gemma 2. null: full attention in
    all layers."""
    layer_norm_epsilon: PositiveFloat = 1e-6
    """Added to the variance in layer norms, and to the mean square in RMS norms."""
    attention_dropout_rate: Probability = 0.0
    """Dropout probability of attention weights, in training only."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of all initial matrices."""

    @property
    def decoder_start_id(self) -> int:
        return self.pad_id if self.bos_id is None else self.bos_id


class T5GemmaConfig(TwoStacks, Gemma):
    """T5Gemma (Zhang et al. 2025): an encoder and a decoder of Gemma 2's layers, which may differ in depth and
    width."""

    family: Literal["t5gemma"] = "t5gemma"
    full_attention_every: Count | None = 2
    attention_softcap: PositiveFloat | None = 50.0
    """Soft cap of attention logits, cap · tanh(logits / cap), as in Gemma 2. null: off."""
    output_softcap: PositiveFloat | None = 30.0
    """Soft cap of the output's logits. null: off."""


class T5Gemma2Config(StackConfig, Gemma):
    """The text part of T5Gemma 2 (Zhang et al. 2025): Gemma 3's layers, one attention over targets and inputs, and one
    matrix for both embeddings and the output. Encoder and decoder have the same widths."""

    qk_norm = True
    attention_softcap: ClassVar[None] = None
    output_softcap: ClassVar[None] = None

    family: Literal["t5gemma2"] = "t5gemma2"
    full_attention_every: Count | None = 6
    rope_base: PositiveFloat = 1_000_000.0
    window_rope_base: PositiveFloat | None = 10_000.0


class ModernConfig(TwoStacks, ModernLayers):
    """An encoder-decoder of modern layers, by default like RedLLM's (Zhang et al. 2025). The decoder starts from
    padding."""

    family: Literal["modern"] = "modern"
    sliding_window: Count | None = None
    """Tokens that a query attends to in a decoder layer with a sliding window: itself and those before it. The
    encoder's windows reach as far in both directions. null: full attention in all layers."""
    activation: AnyActivation = "swiglu"
    norm: Norm = "rms"
    biases: bool = False
    qk_norm: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions are encoded in self-attention. `learned`: each stack has a table, which counts from 0."""
    cross_rotation: bool = True
    """Rotary positions in cross-attention too. The decoder's positions then continue after the input's."""
    tie_embeddings: Literal["all", "output", "none"] = "all"
    """Which matrices are tied. `all`: both embeddings and the output. `output`: the decoder's embedding and the output.
    `none`: no matrices."""
    layer_norm_epsilon: PositiveFloat = 1e-6
    attention_dropout_rate: Probability = 0.0
    """Dropout probability of attention weights, in training only."""

    @model_validator(mode="after")
    def _cross_attention_rotates_as_self_attention(self) -> Self:
        if self.cross_rotation and self.positions == "learned":
            raise ValueError("cross_rotation: needs rotary positions, not learned ones; set it to false")
        return self

    @model_validator(mode="after")
    def _one_matrix_has_one_width(self) -> Self:
        if self.tie_embeddings == "all" and self.encoder.d_model != self.decoder.d_model:
            raise ValueError(
                f"tie_embeddings: one matrix can't be {self.encoder.d_model} wide in the encoder and "
                f"{self.decoder.d_model} in the decoder; use output or none"
            )
        return self


class DecoderOnlyConfig(ModernLayers, RotaryHeads, ModelConfig):
    """A decoder-only model, by default like GPT-2 (Radford et al. 2019). Other settings give the layers of Llama,
    Qwen3, Gemma 2 or Gemma 3: docs/explanation/models.md lists them."""

    family: Literal["decoder_only"] = "decoder_only"
    num_layers: Layers
    """Number of layers of a stack."""
    positions: Literal["learned", "rotary", "alibi", "sinusoidal"] = "learned"
    """How positions are encoded; GPT-2's are `learned`."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    """Attention mask of prompts, and of inputs in the objective `in_one_row`. `bidirectional`: their tokens attend to
    one another, as in a prefix LM (Raffel et al. 2020, section 3.2.1)."""
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    """Subtract the next token's position embedding from the output, without or with a layer norm after it (Yan
    2024)."""
    activation: AnyActivation = "gelu_tanh"
    norm: Norm = "layer"
    biases: bool = True
    qk_norm: bool = False
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_embeddings: bool = True
    """Tie the embedding and the output matrix."""

    @model_validator(mode="after")
    def _positions_suit(self) -> Self:
        if self.positions != "learned" and self.subtract_positions != "none":
            raise ValueError(f"subtract_positions: needs learned positions, not {self.positions} ones")
        if self.prefix_attention == "bidirectional" and (self.sliding_window is not None or self.positions == "alibi"):
            raise ValueError(
                "prefix_attention: bidirectional goes with neither windows nor alibi, which look back alone"
            )
        return self


class EncoderOnlyConfig(HeadsShareWidth, ModelConfig):
    """An encoder-only model like BERT (Devlin et al. 2018), without its prediction of the next sentence. RoBERTa has
    `num_token_types: 0`."""

    gone = {"next_sentence": ([False, None], "gone; leave it out: an encoder learns from masked tokens alone")}

    positions: ClassVar[str] = "learned"

    family: Literal["encoder_only"] = "encoder_only"
    num_layers: Layers
    """Number of layers of a stack."""
    max_positions: Count = 512
    """Maximum length of inputs, in tokens."""
    num_token_types: Annotated[int, Field(ge=0)] = 2
    """Number of token types, which BERT has to tell two texts apart. In training all tokens have type 0. 0: no token
    types."""
    activation: Activation = "gelu"
    """Activation of the feed-forward layers."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of all initial matrices."""
    layer_norm_epsilon: PositiveFloat = 1e-12
    """Added to the variance in layer norms, and to the mean square in RMS norms."""


class EmbeddingLossConfig(Section):
    """An auxiliary loss, in training only, that pulls the encoder's output towards an aggregate of the embeddings so
    far.

    With a learned norm on each side the loss can fall without training the encoder: gains shrink, or biases grow, until
    both sides agree. The loss is defined that way, and the published 4e-9 comes from it. `learned_norms: false` closes
    this way out; `cosine` without norms has no scale that could shrink.
    """

    kind: Literal["mse", "l1", "cosine", "log_cosine", "kl", "contrastive"]
    """The loss between aggregate and output. `mse`, `l1`: the mean squared or absolute difference. `cosine`: 1 − (cos +
    1) / 2. `log_cosine`: −log((cos + 1) / 2). `kl`: KL(aggregate ‖ output) of softmaxes over the units. `contrastive`:
    InfoNCE (van den Oord et al. 2018), the cross-entropy of a position's own output among all outputs so far, with
    cosine / 0.1 as logits."""
    aggregation: Literal["mean", "convolution", "matrix"] = "mean"
    """How the embeddings so far are aggregated. `mean`: the author's. `convolution`: a learned causal depthwise
    convolution over `kernel_size` tokens. `matrix`: a learned weight for each pair of positions, which needs
    `max_positions`. The learned aggregations are initialized as means."""
    kernel_size: Count | None = None
    """Kernel size of the convolution, in tokens. null with any other aggregation."""
    coefficient: PositiveFloat = 1.0
    """Coefficient of the loss."""
    embedding_norm: Literal["before_mean", "after_mean", "none"] = "before_mean"
    """Where the layer norm of the embeddings is: before or after the aggregation. `before_mean`: the author's INIT.
    `after_mean`: the author's AVG_CUM_SUM."""
    encoder_norm: bool = True
    """Layer norm on the encoder's output."""
    learned_norms: bool = True
    """The norms on both sides have learned gains and biases. false: they only normalize."""
    detach: Literal["encoder_out", "embedding", "none"] = "encoder_out"
    """The side that is detached: it gets no gradient, except in the gains and biases of its norm."""

    @model_validator(mode="after")
    def _has_a_kernel(self) -> Self:
        if (self.aggregation == "convolution") != (self.kernel_size is not None):
            raise ValueError(
                f"kernel_size is {self.kernel_size}: the aggregation `convolution` needs one, no other has it"
            )
        return self


class AutoregressiveConfig(Depths, OneWidth, ModelConfig):
    """The autoregressive encoder-decoder (Yan 2024). All attention has the width `d_model`. Options are off by default;
    the best published setting is in configs/models/autoregressive-yan2024.yaml."""

    family: Literal["autoregressive"] = "autoregressive"
    d_ff: Count | None = None
    """Width of the feed-forward layers. null: 4 · d_model."""
    num_cross_heads: Count | None = None
    """Number of heads in cross-attention. null: 2 · num_heads."""
    positions: Literal["learned", "rotary"] = "learned"
    """How positions are encoded."""
    max_positions: Count | None = None
    """Maximum length of a row, in tokens. null if nothing limits it: with rotary positions, no `add_positions`, and no
    `matrix` in the embedding loss."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of all initial matrices. Matrices that end a residual branch have this divided by √(2 · layers
    of the stack)."""
    bias: bool = False
    """Biases in linear layers and layer norms."""
    cross_attention_bias: bool | None = None
    """Biases in cross-attention. null: as `bias`."""
    order: Literal["original", "alternate"] = "original"
    """Order of the attentions in a decoder layer. `original`: self-attention first. `alternate`: cross-attention
    first."""
    bridge_norm: bool = False
    """Layer norm before the linear map from encoder to decoder."""
    subtract_positions: Literal["none", "without_norm", "with_norm"] = "none"
    """Subtract the next token's position embedding from the decoder's output, without or with a layer norm after it.
    They are the author's YES_NO_LN and YES_LN. With rotary positions `add_positions` must be true as well."""
    add_positions: bool = False
    """Add the next token's position embedding to the decoder's input. With rotary positions, the table of position
    embeddings has no other use."""
    embedding_loss: EmbeddingLossConfig | None = None
    """An auxiliary loss that pulls the encoder's output towards an aggregate of the embeddings so far. null: off."""

    @property
    def cross_heads(self) -> int:
        return self.num_cross_heads or 2 * self.num_heads

    @property
    def position_rows(self) -> int:
        """Rows of the table of position embeddings; 0 without a table. The position after the last token may have a
        row."""
        reads_next = self.add_positions or self.subtract_positions != "none"
        if self.max_positions is None or not (self.positions == "learned" or reads_next):
            return 0
        return self.max_positions + reads_next

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        heads = {"num_heads": self.num_heads, "num_cross_heads": self.cross_heads}
        problems = [
            f"{name} {number} doesn't divide d_model {self.d_model}"
            for name, number in heads.items()
            if self.d_model % number
        ]
        matrix = self.embedding_loss is not None and self.embedding_loss.aggregation == "matrix"
        limited = self.positions == "learned" or self.add_positions or matrix
        if limited and self.max_positions is None:
            problems.append("max_positions is missing: set the maximum length of a row, which learned positions need")
        if not limited and self.max_positions is not None:
            problems.append("max_positions: rotary positions have no table; leave it out")
        if self.positions == "rotary" and self.subtract_positions != "none" and not self.add_positions:
            problems.append("subtract_positions: rotary positions add nothing to subtract; set add_positions: true too")
        if self.positions == "rotary":
            problems += [
                f"rotary positions need heads of even width, but {name} {number} makes heads of {width}"
                for name, number in heads.items()
                if (width := self.d_model // number) % 2 and self.d_model % number == 0
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


_SHIPPED = (
    T5Config,
    BartConfig,
    T5GemmaConfig,
    T5Gemma2Config,
    ModernConfig,
    VanillaConfig,
    AutoregressiveConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
)
OFFERED = offered("families", ModelConfig, [one.model_fields["family"].default for one in _SHIPPED], "family")
"""The settings of the families of installed packages, by name."""

if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = Annotated[reduce(or_, (*_SHIPPED, *OFFERED.values())), Field(discriminator="family")]
    """The `model:` section of a run file; `family` selects the class."""
