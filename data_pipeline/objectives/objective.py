"""The interface of objectives: pure functions from rows of tokens and their keys to inputs and targets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.foundation.config_file import Section
from data_pipeline.text.vocabulary import Vocabulary


class Padded(NamedTuple):
    """Rows of different lengths in one array: row i is `values[i, : lengths[i]]`, the rest is padding.

    `values` (n, longest), `lengths` (n,) int64.
    """

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def full(cls, values: np.ndarray) -> "Padded":
        """Rows without padding: all are as long as the array is wide."""
        return cls(values, np.full(len(values), values.shape[1], dtype=np.int64))

    @property
    def filled(self) -> np.ndarray:
        """(n, longest) bool: True at tokens, False at padding."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True)
class Examples:
    """A model's inputs and targets, row by row.

    `predicted` (n, targets) bool marks the targets that have a loss; None means all but padding. If a row holds several
    examples, `input_segments` and `target_segments` (n, width) number each token's example from 1, with 0 at padding.
    `token_types` (n, inputs) is 1 in the second of two texts, 0 elsewhere. `next_sentence` (n,) is 1 if the second text
    follows the first.
    """

    inputs: Padded
    targets: Padded
    predicted: np.ndarray | None = None
    input_segments: np.ndarray | None = None
    target_segments: np.ndarray | None = None
    token_types: np.ndarray | None = None
    next_sentence: np.ndarray | None = None

    def part(self, start: int, stop: int) -> "Examples":
        """The rows from `start` up to, not including, `stop`."""
        inputs, targets = (Padded(*(array[start:stop] for array in side)) for side in (self.inputs, self.targets))
        return Examples(inputs, targets, **{name: array[start:stop] for name, array in self.optional.items()})

    @property
    def optional(self) -> dict[str, np.ndarray]:
        """The optional arrays that are present, by name."""
        return {name: array for name in _OPTIONAL if (array := getattr(self, name)) is not None}


_OPTIONAL = [field.name for field in fields(Examples)][2:]  # all but inputs and targets


class Objective(Section):
    """Settings of an objective, identified by `name`."""

    name: str
    """The objective."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the values that are stored with each row when it is cut and that `apply` needs ("denoiser")."""
        return ()

    @property
    def raw_length(self) -> int:
        """Tokens of a full row before the objective is applied."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): the maximum number of tokens of each that a row makes, marks included."""
        raise NotImplementedError

    @property
    def sentinels(self) -> int:
        """The most sentinels that a row needs."""
        return 0

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        """One line for each reason why the objective can't be used with this vocabulary."""
        if self.sentinels > vocabulary.sentinels:
            return [f"makes up to {self.sentinels} spans, one sentinel each; there are {vocabulary.sentinels}"]
        return []

    def accepts(self, length: int) -> bool:
        """Whether a row of only `length` tokens, such as the tail of held-out text, makes an example."""
        return 0 < length <= self.raw_length

    def apply(
        self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Mapping[str, np.ndarray]
    ) -> Examples:
        """The examples of `rows`, in the dtype of the rows. Each depends only on its row and its key in `keys` (n,).

        `columns` has an array (n,) for each name in the property `columns`.
        """
        raise NotImplementedError


def by_length(
    rows: Padded, keys: np.ndarray, pad: int, apply: Callable[[np.ndarray, np.ndarray], Examples]
) -> Examples:
    """Calls `apply` with the rows of each length and their keys, and joins the examples in the order of `rows`."""
    widths = np.unique(rows.lengths).tolist()
    if len(widths) == 1:
        return apply(rows.values[:, : widths[0]], keys)
    return together(
        [
            (chosen, apply(rows.values[chosen, :width], keys[chosen]))
            for width in widths
            if len(chosen := np.flatnonzero(rows.lengths == width))
        ],
        pad,
    )


def together(parts: list[tuple[np.ndarray, Examples]], pad: int) -> Examples:
    """Joins sets of examples. Each part has the places (k,) of its rows in the result.

    If some parts have segments, each row of the others is one. Raises ValueError if some parts have token types, …, and
    others don't.
    """
    if len({part.input_segments is None for _, part in parts}) == 2:
        parts = [(places, _one_segment_each(part)) for places, part in parts]
    return Examples(
        placed([(places, part.inputs) for places, part in parts], pad),
        placed([(places, part.targets) for places, part in parts], pad),
        *(_optional(name, [(places, getattr(part, name)) for places, part in parts]) for name in _OPTIONAL),
    )


def _one_segment_each(examples: Examples) -> Examples:
    """The same examples, with the segment 1 in rows that had none."""
    if examples.input_segments is not None:
        return examples
    inputs, targets = (side.filled.astype(np.uint8) for side in (examples.inputs, examples.targets))
    return replace(examples, input_segments=inputs, target_segments=targets)


def _optional(name: str, parts: list[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray | None:
    """Joins arrays (k, …) into one (n, …), filled up with zeros; None if there are none."""
    arrays = [(places, array) for places, array in parts if array is not None]
    if not arrays:
        return None
    if len(arrays) < len(parts):
        raise ValueError(f"{name}: examples with and without it can't be joined")
    widest = max(array.shape[1:] for _, array in arrays)
    dtype = np.result_type(*(array for _, array in arrays))
    whole = np.zeros((sum(len(places) for places, _ in arrays), *widest), dtype=dtype)
    for places, array in arrays:
        inside: tuple[Any, ...] = (places, *(slice(width) for width in array.shape[1:]))
        whole[inside] = array
    return whole


def placed(parts: list[tuple[np.ndarray, Padded]], pad: int) -> Padded:
    """Joins sets of rows. Each part has the places (k,) of its rows in the result."""
    count = sum(len(places) for places, _ in parts)
    width = max(part.values.shape[1] for _, part in parts)
    values = np.full((count, width), pad, dtype=np.result_type(*(part.values for _, part in parts)))
    lengths = np.zeros(count, dtype=np.int64)
    for places, part in parts:
        values[places, : part.values.shape[1]] = part.values
        lengths[places] = part.lengths
    return Padded(values, lengths)
