"""The settings common to all families. The launcher reads these too, so torch isn't imported."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelConfig(BaseModel):
    """The settings common to all families.

    `vocab_size` counts pieces, special tokens and sentinels. By default (None) a run takes it from the corpus, as it
    does `pad_id` and `eos_id`. The rows of the embedding matrix are rounded up to `pad_vocab_to_multiple_of`: with 128,
    T5's 32,100 ids get 32,128 rows. `z_loss` and `label_smoothing` apply in training only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # settings in which a run may differ from the checkpoint it starts from
    training_only: ClassVar[frozenset[str]] = frozenset({"dropout_rate", "z_loss", "label_smoothing"})

    family: str
    vocab_size: Count | None = None
    pad_id: TokenId = 0
    eos_id: TokenId = 1
    pad_vocab_to_multiple_of: Count = 1
    dropout_rate: Probability = 0.0
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    label_smoothing: Probability = 0.0

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
