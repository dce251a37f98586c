"""Causal language modelling: predicts every token from those before it. Also with blanks at the end of a row."""

from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt

from data_pipeline.objectives.objective import Columns, Examples, Objective, Padded, Stretch, concatenated
from data_pipeline.objectives.randomness import random_bits, uniform
from data_pipeline.text.vocabulary import Vocabulary


class NextToken(Objective):
    """The targets are the inputs shifted by one token."""

    length: PositiveInt = 1024
    """Tokens of the inputs and of the targets."""

    @property
    def raw_length(self) -> int:
        """Tokens of a row: one more than the inputs."""
        return self.length + 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.length, self.length

    def accepts(self, length: int) -> bool:
        """Whether a row of `length` tokens has a token to predict and one to predict it from."""
        return 2 <= length <= self.raw_length


class CausalLM(NextToken):
    """Causal language modelling: the targets are the inputs shifted by one token, without special tokens or masks. For
    decoder-only models (nanoGPT) and for models with a causal encoder (Yan 2024).

        row      Thank you for inviting me
        inputs   Thank you for inviting
        targets  you for inviting me
    """

    name: Literal["causal_lm"] = "causal_lm"
    after_marks: bool = True
    """Whether a token after EOS or BOS, the first of a document, has a loss."""

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """The inputs are all but the last token of each row, the targets all but the first. Nothing is random."""
        lengths = rows.lengths - 1
        filled = np.arange(rows.values.shape[1] - 1) < lengths[:, None]
        inputs, targets = rows.values[:, :-1].copy(), rows.values[:, 1:].copy()
        inputs[~filled] = targets[~filled] = vocabulary.pad
        predicted = None
        if not self.after_marks:
            special = [id_ for id_ in (vocabulary.eos, vocabulary.bos) if id_ is not None]
            predicted = filled & ~np.isin(inputs, special)
        return Examples(Padded(inputs, lengths), Padded(targets, lengths), predicted=predicted)


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
