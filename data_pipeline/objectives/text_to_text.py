"""Text-to-text: pairs of an input and its target (Raffel et al. 2020, section 2.4). Nothing is random."""

from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.objectives.objective import Columns, Examples, Objective, Padded, Stretch, concatenated
from data_pipeline.text.vocabulary import Vocabulary


class TextToText(Objective):
    """Text-to-text: pairs of an input and its target. Longer texts are cut when rows are made.

    row      translate English to German: That is good. | Das ist gut.
    inputs   translate English to German: That is good. </s>
    targets  Das ist gut. </s>
    """

    packings = ("complete_documents", "examples")

    name: Literal["text_to_text"] = "text_to_text"
    inputs_length: int = Field(512, ge=2)
    """The most tokens of an input, EOS included."""
    targets_length: int = Field(114, ge=2)
    """The most tokens of a target, EOS included."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Tokens of a row before its target."""
        return ("target_start",)

    @property
    def raw_length(self) -> int:
        return self.inputs_length + self.targets_length - 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs_length, self.targets_length

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """`columns["target_start"]` (n,) is the number of tokens of each row before its target."""
        starts, eos = columns["target_start"].astype(np.int64), vocabulary.eos
        return Examples(
            concatenated(rows, eos, Stretch(np.zeros_like(starts), starts), eos),
            concatenated(rows, eos, Stretch(starts, rows.lengths - starts), eos),
        )
