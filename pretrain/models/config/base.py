"""The settings common to all families. The launcher reads these too, so torch isn't imported."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from data_pipeline.foundation.config_file import Section

Count = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class MupSection(Section):
    """Maximal update parametrisation, muP (Yang et al. 2021): what is tuned at the base width holds at other widths.

    The model of `base_width` is the standard one, to the bit. A wider one has the same depth, heads of the same width
    and, in proportion to d_model, more of them and wider feed-forward layers.
    """

    base_width: Count
    """The d_model whose learning rates and initial deviations the run file gives."""


class ModelConfig(Section):
    """The settings common to all families.

    muP changes the width. With m = width / base width:

    - matrices between layers start with a deviation of fan_in^-½ times what it is at the base width;
    - tables, output matrices, biases and gains start as at the base width;
    - logits are divided by m.

    `OptimizerConfig.width_exponent` has the learning rates.
    """

    # settings in which a run may differ from the checkpoint it starts from
    training_only: ClassVar[frozenset[str]] = frozenset({"dropout_rate", "z_loss", "label_smoothing"})
    # settings that matter to random weights alone
    initial_only: ClassVar[frozenset[str]] = frozenset({"init_std", "init_output_std"})

    family: str
    """The model family."""
    vocab_size: Count | None = None
    """Ids of the tokenizer: those of text, special tokens and sentinels. null: as the corpus has."""
    pad_id: TokenId = 0
    """Id of padding; a run takes it from the corpus unless it is set."""
    eos_id: TokenId = 1
    """Id of EOS; a run takes it from the corpus unless it is set."""
    pad_vocab_to_multiple_of: Count = 1
    """The rows of the embedding matrix are rounded up to a multiple of this: with 128, T5's 32,100 ids get 32,128
    rows."""
    dropout_rate: Probability = 0.0
    """Probability of dropout, in training only."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the z-loss, the mean of log² Z of the output's softmax, in training only. 0 turns it off."""
    label_smoothing: Probability = 0.0
    """The share of a target's probability that is spread over all ids, in training only. 0 turns it off."""
    mup: MupSection | None = None
    """muP: initial deviations and learning rates follow from those of a base width. null: the deviations are as the
    family was published, and the rates don't depend on the width."""

    def architecture(self) -> dict[str, object]:
        """The settings that decide the shapes and the meaning of a model's weights."""
        return self.model_dump(exclude={*self.training_only, *self.initial_only})

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that an input or a target may have with learned positions; None: no limit."""
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
        """The sections with the widths of a stack, by name: the model's own, "", unless each stack has one."""
        return {"": self}

    @property
    def width(self) -> int:
        """d_model of the stack whose states go into the output matrix."""
        return list(self.stacks.values())[-1].d_model

    @property
    def base_width(self) -> int:
        """The width that the deviations of tables and output matrices follow."""
        return self.mup.base_width if self.mup else self.width

    @property
    def widening(self) -> float:
        """How many times as wide as its base the model is: m."""
        return self.width / self.base_width

    @property
    def logits_multiplier(self) -> float:
        """What muP multiplies logits by."""
        return 1 / self.widening

    def in_proportion(self) -> dict[str, int]:
        """The settings that grow with the width, by their path in the model's section, apart from `width` itself."""
        names = ("d_model", "num_heads", "num_cross_heads", "num_key_value_heads", "d_ff")
        return {
            f"{stack}.{name}".lstrip("."): value
            for stack, section in self.stacks.items()
            for name in names
            if (value := getattr(section, name, None)) and (stack or name != "d_model")
        }

    def hidden_std(self, std: float) -> float:
        """The deviation of matrices between layers that have `std` at the base width."""
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


class OneWidth(ModelConfig):
    """The settings of families whose stacks have one width."""

    d_model: Count
    """Width of the embeddings and of every sublayer's output."""
    num_heads: Count
    """Attention heads of a layer."""


class HeadsShareWidth(OneWidth):
    """The settings of families in which each head has d_model / num_heads units."""

    d_ff: Count
    """Width of the feed-forward layers."""

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}")
        return self
