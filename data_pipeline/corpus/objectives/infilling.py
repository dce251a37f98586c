"""Infilling: one span of a row, which may be the whole row, is masked (Donahue et al. 2020; GLM's document-level spans,
Du et al. 2022)."""

from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.corpus.objectives.objective import (
    LONGEST,
    Columns,
    Examples,
    Objective,
    Padded,
    Stretch,
    concatenated,
)
from data_pipeline.corpus.objectives.randomness import random_bits, uniform
from data_pipeline.text.vocabulary import Vocabulary

_WHOLE, _CUTS = 0, 1  # streams of random numbers


class Infilling(Objective):
    """Infilling: one span of a row is masked, and the decoder writes this span. All spans are equally likely, from one
    token to the whole row.

        row      Thank you for inviting me to your party last week
        inputs   Thank you <0> your party last week </s>
        targets  <0> for inviting me to </s>

    Of some rows, `whole_rate`, everything is masked. A model that has learnt this writes a text from nothing:

        inputs   <0> </s>
        targets  <0> Thank you for inviting me to your party last week </s>
    """

    name: Literal["infilling"] = "infilling"
    length: int = Field(512, ge=2, le=LONGEST)
    """Maximum number of tokens of the encoder's input, EOS included."""
    whole_rate: float = Field(0.0, ge=0, le=1)
    """The share of rows that are masked as a whole."""

    @property
    def raw_length(self) -> int:
        """Tokens of a row: a sentinel may stand for a single token, and EOS follows."""
        return self.length - 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length + 1

    @property
    def sentinels(self) -> int:
        return 1

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """Inputs and targets of `rows`, each with the span that its key draws."""
        whole = random_bits(keys, _WHOLE, 1)[:, 0] >> np.uint64(11) < self.whole_rate * 2.0**53  # 53 bits of a float64
        bits = random_bits(keys, _CUTS, 2)
        # two different ones of the places before, between and behind the tokens
        one, other = uniform(bits[:, 0], rows.lengths + 1), uniform(bits[:, 1], rows.lengths)
        other += other >= one
        start = np.where(whole, 0, np.minimum(one, other))
        end = np.where(whole, rows.lengths, np.maximum(one, other))
        before, after = Stretch(np.zeros_like(start), start), Stretch(end, rows.lengths - end)
        sentinel, eos, pad = vocabulary.sentinel(0), vocabulary.eos, vocabulary.pad
        return Examples(
            concatenated(rows, pad, before, sentinel, after, eos),
            concatenated(rows, pad, sentinel, Stretch(start, end - start), eos),
        )
