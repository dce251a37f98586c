"""Span corruption with a fault that the product itself doesn't have: docs/results/loss-curves.md shows its curves."""

from dataclasses import replace
from typing import Literal

import numpy as np

from data_pipeline.corpus.objectives.objective import Columns, Examples, Padded
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.text.vocabulary import Vocabulary


class Planted(SpanCorruption):
    """Span corruption whose examples have a fault."""

    batches_like = "span_corruption"
    name: Literal["planted"] = "planted"  # type: ignore[assignment]
    fault: Literal["no_eos", "cut_targets", "padding_has_a_loss", "no_input"]
    """The fault. `no_eos`: targets lack EOS. `cut_targets`: the second half of the targets is missing.
    `padding_has_a_loss`: targets are padded to three times their length, and padding is predicted too. `no_input`: the
    input is EOS alone."""

    @property
    def shape(self) -> tuple[int, int]:
        inputs, targets = super().shape
        return inputs, 3 * targets if self.fault == "padding_has_a_loss" else targets

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        made = super().apply(rows, keys, vocabulary, columns)
        values, lengths = made.targets
        match self.fault:
            case "no_eos":
                return replace(made, targets=Padded(values, lengths - 1))
            case "cut_targets":
                return replace(made, targets=Padded(values, (lengths + 1) // 2))
            case "padding_has_a_loss":
                padding = np.full((len(values), 2 * values.shape[1]), vocabulary.pad, dtype=values.dtype)
                return replace(made, targets=Padded.full(np.concatenate([values, padding], axis=1)))
            case "no_input":
                eos = np.full((len(values), 1), vocabulary.eos, dtype=values.dtype)
                return replace(made, inputs=Padded.full(eos))
