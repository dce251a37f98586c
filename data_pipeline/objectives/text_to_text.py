"""Text-to-text: pairs of an input and its target (Raffel et al. 2020, section 2.4). Nothing is random."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.objectives.objective import Examples, Objective, Padded
from data_pipeline.text.vocabulary import Vocabulary


class TextToText(Objective):
    """Text-to-text: pairs of an input and its target. Longer texts are cut when rows are made.

    row      translate English to German: That is good. | Das ist gut.
    inputs   translate English to German: That is good. </s>
    targets  Das ist gut. </s>
    """

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

    def apply(
        self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Mapping[str, np.ndarray]
    ) -> Examples:
        """`columns["target_start"]` (n,) is the number of tokens of each row before its target."""
        starts = columns["target_start"].astype(np.int64)
        return Examples(
            _with_end(rows, np.zeros(len(starts), dtype=np.int64), starts, vocabulary.eos),
            _with_end(rows, starts, rows.lengths - starts, vocabulary.eos),
        )


def _with_end(rows: Padded, starts: np.ndarray, lengths: np.ndarray, eos: int) -> Padded:
    """`lengths` (n,) tokens of each row from `starts` (n,) on, and EOS."""
    at = np.arange(int(lengths.max(initial=0)) + 1)
    places = np.minimum(starts[:, None] + at, max(rows.values.shape[1] - 1, 0))
    values = np.take_along_axis(rows.values, places, axis=1) if rows.values.size else np.zeros_like(places)
    return Padded(np.where(at < lengths[:, None], values, eos).astype(rows.values.dtype), lengths + 1)
