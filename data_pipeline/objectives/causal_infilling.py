"""Causal language modelling of texts whose middle comes last (Bavarian et al. 2022)."""

from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.objectives.causal import CausalLM, NextToken
from data_pipeline.objectives.objective import Columns, Examples, Padded, Stretch, concatenated
from data_pipeline.objectives.randomness import random_bits, uniform
from data_pipeline.text.vocabulary import Vocabulary

_CHOICE, _CUTS = 0, 1  # streams of random numbers
_MARKS = 3


class CausalInfilling(NextToken):
    """Causal language modelling in which some rows are cut at two random places, and their middle comes last. A
    decoder-only model learns to fill in a blank with both sides before it.

    With `<k>` for sentinel k; the row loses its last three tokens, so that its length stays:

        row      Thank you for inviting me to your party last week
        as read  <0> Thank you for <1> your party <2> inviting me to
        inputs   <0> Thank you for <1> your party <2> inviting me
        targets  Thank you for <1> your party <2> inviting me to

    Any part may be empty. Rows of fewer than five tokens stay as they are.
    """

    name: Literal["causal_infilling"] = "causal_infilling"
    length: int = Field(1024, ge=4)
    fim_rate: float = Field(0.5, gt=0, le=1)
    """The share of rows whose middle comes last; the others are read as in `causal_lm`."""

    @property
    def sentinels(self) -> int:
        return _MARKS

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        draws = random_bits(keys, _CHOICE, 1)[:, 0] >> np.uint64(11)  # 53 bits, as many as a float64 holds
        chosen = (draws < self.fim_rate * 2**53) & (rows.lengths > _MARKS + 1)
        values = rows.values.copy()
        if chosen.any():
            some = Padded(rows.values[chosen], rows.lengths[chosen])
            moved = self._with_the_middle_last(some, keys[chosen], vocabulary)
            values[chosen, : moved.values.shape[1]] = moved.values
        return CausalLM(length=self.length).apply(Padded(values, rows.lengths), keys, vocabulary, columns)

    def _with_the_middle_last(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary) -> Padded:
        text = rows.lengths - _MARKS
        bits = random_bits(keys, _CUTS, 2)
        start, end = np.sort(np.stack([uniform(bits[:, cut], text + 1) for cut in range(2)]), axis=0)
        first = vocabulary.first_sentinel
        before, middle = Stretch(np.zeros_like(start), start), Stretch(start, end - start)
        return concatenated(rows, vocabulary.pad, first, before, first - 1, Stretch(end, text - end), first - 2, middle)
