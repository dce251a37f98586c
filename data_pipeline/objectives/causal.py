"""Causal language modelling: predicts every token from those before it."""

from typing import Literal

import numpy as np
from pydantic import PositiveInt

from data_pipeline.objectives.objective import Columns, Examples, Objective, Padded
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
