"""The settings common to all families. The launcher reads these too, so torch isn't imported."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from data_pipeline.foundation.config_file import Section

Count = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelConfig(Section):
    """The settings common to all families."""

    # settings in which a run may differ from the checkpoint it starts from
    training_only: ClassVar[frozenset[str]] = frozenset({"dropout_rate", "z_loss", "label_smoothing"})

    family: str
    """The model family."""
    vocab_size: Count | None = None
    """Ids of the tokenizer: pieces, special tokens and sentinels. null: as the corpus has."""
    pad_id: TokenId = 0
    """Id of padding; a run takes it from the corpus unless it is set."""
    eos_id: TokenId = 1
    """Id of the end mark; a run takes it from the corpus unless it is set."""
    pad_vocab_to_multiple_of: Count = 1
    """The rows of the embedding matrix are rounded up to a multiple of this: with 128, T5's 32,100 ids get 32,128
    rows."""
    dropout_rate: Probability = 0.0
    """Probability of dropout, in training only."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the z-loss, the mean of log² Z of the output's softmax, in training only. 0 turns it off."""
    label_smoothing: Probability = 0.0
    """The share of a target's probability that is spread over all ids, in training only. 0 turns it off."""

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


class HeadsShareWidth(ModelConfig):
    """The settings of families in which each head has d_model / num_heads units."""

    d_model: Count
    """Width of the embeddings and of every sublayer's output."""
    d_ff: Count
    """Width of the feed-forward layers."""
    num_heads: Count
    """Attention heads of a layer."""

    @property
    def d_kv(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} doesn't divide d_model {self.d_model}")
        return self
