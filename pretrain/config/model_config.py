"""The settings that the `model:` sections of several families share: general ones, widths and depths, positions, and
modern layers. `pretrain.config.models` has the families. Neither module imports torch, so that a run file is checked in
milliseconds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from data_pipeline.base.config_file import Section

Count = Annotated[int, Field(gt=0, le=2**20)]  # a dimension, or a number of tokens
Layers = Annotated[int, Field(gt=0, le=2**10)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Norm = Literal["layer", "rms", "rms_around_one"]
Activation = Literal["relu", "gelu", "gelu_tanh"]
AnyActivation = Literal[Activation, "swiglu", "geglu"]


class MupSection(Section):
    """Maximal update parametrization, muP (Yang et al. 2021): hyperparameters that are tuned at the base width hold at
    other widths.

    A model of `base_width` is the standard model, to the bit. A wider model has the same depth and the same width of
    heads. Its number of heads and its feed-forward width grow with d_model.
    """

    base_width: Count
    """The d_model at which the run file's learning rates and initial standard deviations were tuned."""


class ModelConfig(Section):
    """The settings that all families have.

    muP changes the width. With m = width / base width:

    - matrices between layers have fan_in^-½ times the initial standard deviation that they have at the base width;
    - embeddings, output matrices, biases and gains are initialized as at the base width;
    - logits are divided by m.

    `OptimizerConfig.width_exponent` has the learning rates.
    """

    # settings in which a run may differ from the checkpoint that it starts from
    training_only: ClassVar[frozenset[str]] = frozenset(
        {"dropout_rate", "attention_dropout_rate", "activation_dropout_rate", "z_loss", "label_smoothing"}
    )
    # settings of random weights
    initial_only: ClassVar[frozenset[str]] = frozenset({"init_std", "init_output_std"})

    # set by a family of another package: the arguments of `pretrain.models.Family` after `config`
    offers: ClassVar[Mapping[str, Any]] = {}

    family: str
    """The model family."""
    vocab_size: Count | None = None
    """Size of the tokenizer: text tokens, special tokens and sentinels. null: the size of the corpus's tokenizer."""
    pad_id: NonNegativeInt = 0
    """Id of the padding token. Unless it is set, a run takes the corpus's."""
    eos_id: NonNegativeInt = 1
    """Id of the EOS token. Unless it is set, a run takes the corpus's."""
    pad_vocab_to_multiple_of: Count = 1
    """Round the rows of the embedding matrix up to a multiple of this number: with 128, T5's 32,100 ids get 32,128
    rows."""
    dropout_rate: Probability = 0.0
    """Dropout probability, in training only."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the z-loss, the mean of log² Z of the output softmax, in training only. 0: off."""
    label_smoothing: Probability = 0.0
    """The share of a target's probability that is spread evenly over all ids, in training only. 0: off."""
    mup: MupSection | None = None
    """muP: the initial standard deviations and the learning rates of a base width are adapted to this width. null: off;
    initial standard deviations are as published, and learning rates don't depend on the width."""

    def architecture(self) -> dict[str, object]:
        """The settings that decide the shapes and the meaning of a model's weights."""
        return self.model_dump(exclude={*self.training_only, *self.initial_only})

    @property
    def longest_sequence(self) -> int | None:
        """Maximum length of an input or a target, in tokens, with learned positions. None: no limit."""
        return getattr(self, "max_positions", None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not set yet; a run takes it from the corpus")
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of

    @property
    def decoder_start_id(self) -> int:
        """The id that a decoder reads before the first target."""
        return self.pad_id

    @property
    def stacks(self) -> dict[str, Any]:
        """The section of each stack, by name. If stacks have no sections, the model's section as ""."""
        return {"": self}

    @property
    def width(self) -> int:
        """d_model of the stack whose hidden states go into the output matrix."""
        return list(self.stacks.values())[-1].d_model

    @property
    def base_width(self) -> int:
        """The width that sets the initial standard deviations of embeddings and output matrices."""
        return self.mup.base_width if self.mup else self.width

    @property
    def widening(self) -> float:
        """m: the width relative to the base width."""
        return self.width / self.base_width

    @property
    def logits_multiplier(self) -> float:
        """The factor that logits are multiplied by with muP."""
        return 1 / self.widening

    def in_proportion(self) -> dict[str, int]:
        """The settings that grow with the width, by their path in the model's section, except `width` itself."""
        names = ("d_model", "num_heads", "num_cross_heads", "num_key_value_heads", "d_ff")
        return {
            f"{stack}.{name}".lstrip("."): value
            for stack, section in self.stacks.items()
            for name in names
            if (value := getattr(section, name, None)) and (stack or name != "d_model")
        }

    def hidden_std(self, std: float) -> float:
        """The initial standard deviation of matrices between layers that have `std` at the base width."""
        return std * self.widening**-0.5

    @model_validator(mode="after")
    def _base_has_whole_heads(self) -> Self:
        problems = [
            f"mup: {name} {value} would be {value / self.widening:g} at base_width {self.base_width}; heads keep their "
            "width and layers their proportions, so it grows with d_model"
            for name, value in self.in_proportion().items()
            if value * self.base_width % self.width
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


class OneWidth(Section):
    """The width of a stack and the number of its attention heads."""

    d_model: Count
    """Width of the embeddings and of the output of every sublayer."""
    num_heads: Count
    """Number of attention heads in a layer."""


class Widths(OneWidth):
    """The widths of a stack's sublayers."""

    d_ff: Count
    """Width of the feed-forward layers."""


class Depths(Section):
    """The numbers of encoder and decoder layers."""

    num_encoder_layers: Layers
    """Number of encoder layers."""
    num_decoder_layers: Layers
    """Number of decoder layers."""


class HeadsShareWidth(Widths):
    """The widths of families whose heads have d_model / num_heads units each."""

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}")
        return self


class Heads(Widths):
    """The widths of a layer with multi-head or grouped-query attention (Ainslie et al. 2023)."""

    num_key_value_heads: Count | None = None
    """Number of key and value heads; num_heads / num_key_value_heads query heads share each of them (grouped-query
    attention). null: `num_heads`."""
    head_dim: Count | None = None
    """Width of an attention head. null: d_model / num_heads."""
    query_pre_attn_scalar: Count | None = None
    """Attention logits are divided by the square root of this number. null: the width of a head."""

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_key_value_heads or self.num_heads

    @property
    def attention_scalar(self) -> int:
        """Attention logits are divided by the square root of this."""
        return self.query_pre_attn_scalar or self.d_kv

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}; set head_dim")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_key_value_heads: {self.kv_heads} doesn't divide num_heads {self.num_heads}")
        return self


class RotaryHeads(Heads):
    """The widths of a layer with rotary positions (RoPE), unless its family is set to other positions."""

    @model_validator(mode="after")
    def _heads_are_even(self) -> Self:
        if getattr(self, "positions", "rotary") == "rotary" and self.d_kv % 2:
            raise ValueError(f"head_dim: {self.d_kv} is odd; rotary positions need heads of even width")
        return self


class Rotation(NamedTuple):
    """How rotary positions rotate: the base of their frequencies, and the factor by which positions are divided."""

    base: float
    factor: float = 1.0


class LocalAndGlobal(Section):
    """Which layers have full attention and which have a sliding window, with rotary positions (Gemma 2 and 3)."""

    sliding_window: Count | None = None
    """Tokens that a query attends to in a layer with a sliding window: itself and those before it. null: full attention
    in all layers."""
    full_attention_every: Count | None = None
    """Every n-th layer has full attention, the others a sliding window. null: all layers have the window, if
    `sliding_window` is set."""
    rope_base: PositiveFloat = 10_000.0
    """Base of the rotary frequencies (RoPE theta)."""
    rope_factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Factor by which rotary positions are divided, so that a model reads longer texts than before (linear scaling,
    Chen et al. 2023). T5Gemma 2 has 8."""
    window_rope_base: PositiveFloat | None = None
    """RoPE base of layers with a sliding window; `rope_factor` doesn't apply to them. null: these layers rotate as the
    others do."""

    def has_full_attention(self, layer: int) -> bool:
        """True if a layer, counted from 0, has full attention."""
        every = self.full_attention_every
        return self.sliding_window is None or (every is not None and (layer + 1) % every == 0)

    @property
    def rotation(self) -> Rotation:
        """The rotation of layers with full attention."""
        return Rotation(self.rope_base, self.rope_factor)

    def window_and_rotation(self, layer: int) -> tuple[int | None, Rotation]:
        """The sliding window of a layer, counted from 0, and its rotation."""
        if self.has_full_attention(layer):
            return None, self.rotation
        return self.sliding_window, Rotation(self.window_rope_base) if self.window_rope_base else self.rotation

    @model_validator(mode="before")
    @classmethod
    def _without_windows(cls, settings: Any) -> Any:
        """Settings of windows are null by default if `sliding_window` is set to null."""
        if isinstance(settings, Mapping) and settings.get("sliding_window", 0) is None:
            return {"full_attention_every": None, "window_rope_base": None, **settings}
        return settings

    @model_validator(mode="after")
    def _windows_are_whole(self) -> Self:
        needing = {"full_attention_every": self.full_attention_every, "window_rope_base": self.window_rope_base}
        for name, value in needing.items():
            if value is not None and self.sliding_window is None:
                raise ValueError(f"{name}: needs a sliding_window")
        return self


class Positions(Section):
    """How positions are encoded. Only learned positions have a table, and with it a maximum length."""

    positions: str
    """How positions are encoded."""
    max_positions: Count | None = None
    """Maximum length of inputs and of targets with learned positions, in tokens. null for other positions, which have
    no limit."""

    @model_validator(mode="after")
    def _only_learned_positions_have_a_limit(self) -> Self:
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("max_positions is missing: learned positions need it")
        if self.positions != "learned" and self.max_positions is not None:
            raise ValueError(f"max_positions: {self.positions} positions have no limit; leave it out")
        return self


class ModernLayers(Positions, LocalAndGlobal):
    """Modern layers: GPT-2's, Llama's, Qwen3's and Gemma's are settings of them."""

    activation: AnyActivation
    """Activation of the feed-forward layers. `gelu_tanh` is GPT-2's tanh approximation of GELU. `swiglu` and `geglu`
    are gated, by SiLU and by that approximation."""
    norm: Norm
    """Kind of norms. `layer`: LayerNorm, as in GPT-2. `rms`: RMSNorm, as in Llama. `rms_around_one`: RMSNorm with gains
    of 1 + weight, as in Gemma."""
    biases: bool
    """Biases in linear layers and layer norms."""
    norm_after: bool = False
    """A second norm in each sublayer: of its output, before the output is added to the residual stream, as in Gemma
    2."""
    qk_norm: bool
    """RMSNorm of each head's queries and keys, in self- and cross-attention, as in Qwen3."""
    attention_softcap: PositiveFloat | None = None
    """Soft cap of attention logits, cap · tanh(logits / cap), as in Gemma 2. null: off."""
    output_softcap: PositiveFloat | None = None
    """Soft cap of the output's logits. null: off."""
    scale_embedding: bool = False
    """Multiply token embeddings by √d_model."""
    layer_norm_epsilon: PositiveFloat
    """Added to the variance in layer norms, and to the mean square in RMS norms."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Matrices that end a residual branch have this divided by the square
    root of the stack's number of branches."""

    @model_validator(mode="after")
    def _rotations_have_positions(self) -> Self:
        rotates = self.rotation != Rotation(10_000.0) or self.window_rope_base is not None
        if self.positions != "rotary" and rotates:
            raise ValueError(f"rope_base, rope_factor: need rotary positions, not {self.positions} ones")
        return self
