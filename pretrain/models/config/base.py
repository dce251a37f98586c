"""What every family's config has. No torch: the launcher reads these too."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelConfig(BaseModel):
    """What every family has.

    `vocab_size` counts pieces, special tokens and sentinels; None takes it from the corpus, as a run does with `pad_id`
    and `eos_id`. The embedding matrix has `pad_vocab_to_multiple_of` as the unit of its rows: 128 turns T5's 32,100 ids
    into 32,128 rows. `z_loss` and `label_smoothing` are part of training only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # settings that may be others in a run than in the weights it starts from
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
        """Most tokens of an input and of a target, as learned positions have it; None: any number."""
        return getattr(self, "max_positions", None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known yet: it comes from the corpus")
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of

    @property
    def decoder_start_id(self) -> int:
        """What a decoder reads before the first target."""
        return self.pad_id
