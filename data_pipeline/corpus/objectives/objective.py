"""The interface of objectives: pure functions from rows of tokens and their keys to a model's inputs and targets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from data_pipeline.base.config_file import OneOf, Section
from data_pipeline.base.packages import Kinds
from data_pipeline.text.vocabulary import Vocabulary

Columns = Mapping[str, np.ndarray]
LONGEST = 1 << 20
"""Maximum number of tokens of inputs or targets. Denoising keeps positions in 20 bits, and all objectives make arrays
of rows × tokens, 8 bytes each."""


class Padded(NamedTuple):
    """Rows of different lengths in one array: row i is `values[i, : lengths[i]]`, the rest is padding.

    `values` (n, longest), `lengths` (n,) int64.
    """

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def full(cls, values: np.ndarray) -> "Padded":
        """Rows that are all as long as the array is wide."""
        return cls(values, np.full(len(values), values.shape[1], dtype=np.int64))

    @classmethod
    def of_flat(cls, flat: np.ndarray, lengths: np.ndarray, pad: int = 0) -> "Padded":
        """Rows that follow each other in `flat`; `pad` fills up the shorter ones."""
        longest = int(lengths.max(initial=0))
        if (lengths == longest).all():
            return cls(flat.reshape(len(lengths), longest), lengths)
        rows = cls(np.full((len(lengths), longest), pad, dtype=flat.dtype), lengths)
        rows.values[rows.filled] = flat
        return rows

    @property
    def filled(self) -> np.ndarray:
        """(n, longest) bool: True at tokens, False at padding."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True)
class Examples:
    """A model's inputs and targets, row by row.

    Attributes:
        predicted: (n, targets) bool, the targets with a loss; None: all but padding.
        input_segments, target_segments: (n, width), the number of each token's example from 1, 0 at padding; None: one
            example in a row.
        prefix_mask: (n, inputs), 1 at tokens that all tokens of their example attend to, else 0.
    """

    inputs: Padded
    targets: Padded
    predicted: np.ndarray | None = None
    input_segments: np.ndarray | None = None
    target_segments: np.ndarray | None = None
    prefix_mask: np.ndarray | None = None

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

    packings: ClassVar[tuple[str, ...]] = ("concatenate", "complete_documents")
    """The packings whose rows the objective takes."""

    batches_like: ClassVar[str] = ""
    """The name of an objective that ships and makes the same kind of batches; "": the kind is its own."""

    name: str
    """The objective."""

    @property
    def kind_of_batches(self) -> str:
        """The name by which model families list the batches that they train on."""
        return self.batches_like or self.name

    @property
    def full_name(self) -> str:
        """The name, also of an objective inside: "in_one_row of text_to_text"."""
        return self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the values that `apply` needs and that are stored with each row when it is cut ("denoiser")."""
        return ()

    @property
    def raw_length(self) -> int:
        """Tokens of a full row before the objective is applied."""
        raise NotImplementedError

    @property
    def whole_length(self) -> int:
        """Maximum number of tokens of a row that is a whole document."""
        return self.raw_length

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): the maximum number of tokens of each, with special tokens."""
        raise NotImplementedError

    @property
    def as_cut(self) -> "Objective":
        """The objective that its rows are cut for."""
        return self

    @property
    def sentinels(self) -> int:
        """Maximum number of sentinels of a row."""
        return 0

    def for_rows_of(self, tokens: int) -> "Objective | None":
        """The same objective for rows of this many tokens; None if no value of its key `length` or `inputs_length`
        gives such rows."""
        key = next((one for one in ("length", "inputs_length") if one in type(self).model_fields), None)
        settings, low, high = self.model_dump(exclude_unset=True), 1, 2 * tokens
        while key and low <= high:  # a row has more tokens, the larger its length
            middle = (low + high) // 2
            try:
                found = type(self).model_validate({**settings, key: middle})
            except ValueError:  # too short
                low = middle + 1
                continue
            if found.raw_length == tokens:
                return found
            low, high = (middle + 1, high) if found.raw_length < tokens else (low, middle - 1)
        return None

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        """One line for each reason against using the objective with this vocabulary."""
        if self.sentinels > vocabulary.sentinels:
            return [f"makes up to {self.sentinels} spans, one sentinel each; there are {vocabulary.sentinels}"]
        return []

    def accepts(self, length: int) -> bool:
        """Whether a row of `length` tokens, such as the last row of a bucket, makes an example."""
        return 0 < length <= self.raw_length

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """The examples of `rows`, in the rows' dtype. Each depends only on its row and its key in `keys` (n,).

        `columns`: an array (n,) for each name in the property `columns`.
        """
        raise NotImplementedError


class Stretch(NamedTuple):
    """`counts` tokens of each row, from its token `starts` on; both are (n,) int64."""

    starts: np.ndarray
    counts: np.ndarray


def concatenated(rows: Padded, pad: int, *parts: int | Stretch) -> Padded:
    """Rows made of `parts`, one after the other: special tokens, and stretches of `rows`.

    Rows [[5, 6, 7]], the stretch of 2 tokens from 1 on, and the token 9  ->  [[6, 7, 9]]
    """
    count, width = rows.values.shape
    special = [part for part in parts if not isinstance(part, Stretch)]
    tokens = np.append(rows.values.ravel(), np.array(special, dtype=rows.values.dtype))
    row_starts, ones = np.arange(count) * width, np.ones(count, dtype=np.int64)
    specials = iter(range(count * width, len(tokens)))
    starts = [row_starts + part.starts if isinstance(part, Stretch) else ones * next(specials) for part in parts]
    sizes = np.stack([part.counts if isinstance(part, Stretch) else ones for part in parts], axis=1)
    taken = tokens.take(ranges(np.stack(starts, axis=1).ravel(), sizes.ravel()))
    return Padded.of_flat(taken, sizes.sum(axis=1), pad)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """start, start + 1, … of each range of `sizes` numbers, one range after the other."""
    stops = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(starts - stops + sizes, sizes)


def together(parts: list[tuple[np.ndarray, Examples]], pad: int) -> Examples:
    """Merges parts, each with the indices (k,) of its rows in the result.

    If only some parts have segments, predictions or a prefix mask, the other parts get the values that mean the same as
    none.
    """
    for name, absent in _ABSENT.items():
        if len({name in part.optional for _, part in parts}) == 2:
            parts = [(indices, part if name in part.optional else absent(part)) for indices, part in parts]
    optional = {}
    for name in _OPTIONAL:
        arrays = [(indices, part.optional[name]) for indices, part in parts if name in part.optional]
        if arrays:
            optional[name] = _scattered(arrays, 0)
    inputs = _merged([(indices, part.inputs) for indices, part in parts], pad)
    targets = _merged([(indices, part.targets) for indices, part in parts], pad)
    return Examples(inputs, targets, **optional)


def _merged(parts: list[tuple[np.ndarray, Padded]], pad: int) -> Padded:
    return Padded(
        _scattered([(indices, part.values) for indices, part in parts], pad),
        _scattered([(indices, part.lengths) for indices, part in parts], 0),
    )


def _with_segments(examples: Examples) -> Examples:
    """The same examples, each in the segment 1."""
    inputs, targets = (side.filled.astype(np.uint8) for side in (examples.inputs, examples.targets))
    return replace(examples, input_segments=inputs, target_segments=targets)


_ABSENT: Mapping[str, Callable[[Examples], Examples]] = {
    "input_segments": _with_segments,
    "predicted": lambda examples: replace(examples, predicted=examples.targets.filled),
    "prefix_mask": lambda examples: replace(examples, prefix_mask=np.zeros_like(examples.inputs.values, np.uint8)),
}
"""For some optional arrays: the examples with the array that means the same as none."""


def _scattered(parts: list[tuple[np.ndarray, np.ndarray]], fill: int) -> np.ndarray:
    """One array (n, widest, …) of arrays (k, width, …), each with the indices (k,) of its rows."""
    widest = max(array.shape[1:] for _, array in parts)
    rows = sum(len(indices) for indices, _ in parts)
    whole = np.full((rows, *widest), fill, dtype=np.result_type(*(array for _, array in parts)))
    for indices, array in parts:
        inside: tuple[Any, ...] = (indices, *map(slice, array.shape[1:]))
        whole[inside] = array
    return whole


_HERE = "data_pipeline.corpus.objectives"
_SHIPPED = {
    "span_corruption": f"{_HERE}.span_corruption:SpanCorruption",
    "iid_denoising": f"{_HERE}.iid_denoising:IidDenoising",
    "prefix_lm": f"{_HERE}.language_modelling:PrefixLM",
    "full_lm": f"{_HERE}.language_modelling:FullLM",
    "infilling": f"{_HERE}.infilling:Infilling",
    "ul2": f"{_HERE}.ul2:UL2",
    "denoising": f"{_HERE}.denoising:Denoising",
    "causal_lm": f"{_HERE}.language_modelling:CausalLM",
    "causal_infilling": f"{_HERE}.language_modelling:CausalInfilling",
    "masked_lm": f"{_HERE}.masked_lm:MaskedLM",
    "text_to_text": f"{_HERE}.text_to_text:TextToText",
}
_IN_ONE_ROW = {"in_one_row": f"{_HERE}.text_to_text:InOneRow"}
_OF_RUNS = Kinds("objectives", Objective, "name", _SHIPPED | _IN_ONE_ROW)
_OF_CORPORA = Kinds("objectives", Objective, "name", _SHIPPED)

AnyObjective = Annotated[Objective, OneOf("name", _OF_CORPORA)]
"""The objectives that a corpus can be built for."""
TrainingObjective = Annotated[Objective, OneOf("name", _OF_RUNS)]
"""The objectives that a run can train on."""
