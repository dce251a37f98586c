"""Span corruption: T5's objective (Raffel et al. 2020, section 3.1.4; T5's `random_spans_noise_mask` and its helper for
lengths). I.i.d. denoising also uses `with_sentinels`."""

from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from data_pipeline.corpus.objectives.objective import LONGEST, Columns, Examples, Objective, Padded, together
from data_pipeline.corpus.objectives.randomness import random_bits, uniform
from data_pipeline.text.vocabulary import Vocabulary

_LONGEST_ROW = 1 << 24  # tokens: the reference counts in float32, which has all integers up to here
_LENGTHS_AT_ONCE = 1 << 20
_NOISE, _KEPT, _ROLL = 0, 1, 2  # streams of random numbers: the two segmentations are independent


class SpanCorruption(Objective):
    """Span corruption: the decoder writes the spans that the encoder's input lacks. Rows are cut to a length that needs
    no padding.

    With `<k>` for sentinel k and `</s>` for EOS:

        row      Thank you for inviting me to your party last week
        inputs   Thank you <0> me to your party last <1> </s>
        targets  <0> for inviting <1> week </s>

    `random_roll` draws the offset from 0 … length − 1. As in T5, inputs and targets still number their own runs from 0.
    If the row begins with a masked token, the targets begin with that span, and their sentinel k stands for the k-th
    kept run. A run that is rotated across the end is split in two and takes one more sentinel. Rows leave room for this
    sentinel: without such a split, inputs or targets are one token shorter. The mask above rotated by 7 and by 1:

        inputs   <0> you for inviting me to <1> party last <2> </s>
        targets  Thank <0> your <1> week </s>
        inputs   <0> you for <1> to your party last week </s>
        targets  Thank <0> inviting me <1> </s>
    """

    name: Literal["span_corruption"] = "span_corruption"
    inputs_length: int = Field(512, gt=0, le=LONGEST)
    """Number of tokens of the encoder's input, EOS included."""
    noise_density: float = Field(0.15, gt=0, lt=1)
    """The share of a row's tokens that are masked."""
    mean_span_length: float = Field(3.0, ge=1)
    """Mean length of a masked span, in tokens."""
    random_roll: bool = False
    """Rotate the mask by a random offset, so that every token is masked with the same probability."""

    @model_validator(mode="after")
    def _spans_fit(self) -> "SpanCorruption":
        if self.raw_length < 2:
            raise ValueError(f"inputs_length: {self.inputs_length} leaves no room for a masked span")
        noise, spans = self._noise(self.raw_length)
        if not self.accepts(self.raw_length):
            kept = self.raw_length - noise
            problem = f"{spans} spans can't be kept apart by the {kept} unmasked tokens"
            raise ValueError(f"noise_density: {problem}; lower it or raise mean_span_length")
        return self

    @cached_property
    def raw_length(self) -> int:
        """Tokens of a row before masking: 568 for 512 inputs, density 0.15, mean span 3."""
        first, count = self.inputs_length - self.random_roll, 1024
        while first <= _LONGEST_ROW:
            lengths = np.arange(first, first + count)
            too_long = np.flatnonzero(self._corrupted(lengths)[0] > self.inputs_length)
            if len(too_long):
                length = first + int(too_long[0]) - 1
                return length - self._excess(length)
            first, count = first + count, min(2 * count, _LENGTHS_AT_ONCE)
        problem = f"a row would have more than {_LONGEST_ROW:,} tokens"
        raise ValueError(f"noise_density: {problem}; lower it, mean_span_length or inputs_length")

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): 512 and 114 for T5's defaults. As in T5's helper, rounding may leave the last position of
        the targets empty at density 0.5."""
        excess = self._excess(self.raw_length + 1)
        return self.inputs_length, int(self._corrupted(self.raw_length + excess)[1]) - excess

    @property
    def sentinels(self) -> int:
        """One for each masked span of a row, and one more if a span may be rolled into two parts."""
        return int(self._noise(self.raw_length)[1]) + self.random_roll

    def accepts(self, length: int) -> bool:
        """Whether a row of `length` tokens can be masked: unmasked tokens must keep its spans apart."""
        noise, spans = self._noise(max(length, 2))
        return length >= 2 and bool(spans <= length - noise)

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """Inputs and targets of `rows`, each masked by its key.

        Rows of the same length have the same number of masked tokens and spans. Unless the mask is rolled, the first
        token is always kept and the last is always masked.
        """
        parts = []
        for length in np.unique(rows.lengths).tolist():
            chosen = np.flatnonzero(rows.lengths == length)
            masked = _noise_mask(keys[chosen], length, *map(int, self._noise(length)))
            masked = _rolled(masked, keys[chosen]) if self.random_roll else masked
            parts.append((chosen, with_sentinels(Padded.full(rows.values[chosen, :length]), masked, vocabulary)))
        return parts[0][1] if len(parts) == 1 else together(parts, vocabulary.pad)

    def _noise(self, lengths: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(masked tokens, spans) of rows of `lengths`, a number or (n,). Products are float32, as in the reference."""
        lengths = np.asarray(lengths)
        products = lengths.astype(np.float32) * np.float32(self.noise_density)
        noise = np.clip(np.round(products), 1, lengths - 1).astype(np.int64)
        spans = np.round(noise.astype(np.float32) / np.float32(self.mean_span_length)).astype(np.int64)
        return noise, np.maximum(1, spans)

    def _excess(self, length: int) -> int:
        """1 if density 0.5 would make the targets longer than the inputs: T5's helper then takes one token less."""
        inputs, targets = self._corrupted(length)
        return int(self.noise_density == 0.5 and inputs <= self.inputs_length and targets > inputs)

    def _corrupted(self, lengths: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), in tokens, of rows of `lengths`, a number or (n,)."""
        noise, spans = self._noise(np.maximum(lengths, 2))
        runs = spans + self.random_roll
        return lengths - noise + runs + 1, noise + runs + 1


def _segmentation(keys: np.ndarray, stream: int, items: int, parts: int) -> np.ndarray:
    """(n, parts) int64: the sizes of non-empty `parts` of `items`, every division equally likely."""
    edges = np.zeros((len(keys), parts + 1), dtype=np.int64)
    edges[:, -1] = items
    if parts > 1:
        # a row's numbers are distinct, so exactly parts − 1 of them reach no higher than the (parts − 1)-th smallest
        bits = random_bits(keys, stream, items - 1)
        highest = np.partition(bits, parts - 2, axis=1)[:, parts - 2 : parts - 1]
        cuts = np.flatnonzero(bits <= highest).reshape(len(keys), parts - 1)
        edges[:, 1:-1] = cuts - np.arange(len(keys))[:, None] * (items - 1) + 1
    return np.diff(edges, axis=1)


def _noise_mask(keys: np.ndarray, length: int, noise: int, spans: int) -> np.ndarray:
    """(n, length) bool, True where masked: kept and masked segments alternate, a kept one first."""
    kept = _segmentation(keys, _KEPT, length - noise, spans)
    masked = _segmentation(keys, _NOISE, noise, spans)
    lengths = np.stack([kept, masked], axis=2).reshape(-1)
    pattern = np.tile(np.array([False, True]), len(keys) * spans)
    return np.repeat(pattern, lengths).reshape(len(keys), length)


def _rolled(masked: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`masked` (n, length), with each row rotated to the right by its own random offset."""
    length = masked.shape[1]
    offsets = uniform(random_bits(keys, _ROLL, 1)[:, 0], length)
    twice = np.concatenate([masked, masked], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(twice, length, axis=1)
    return windows[np.arange(len(keys)), length - offsets]


def with_sentinels(rows: Padded, masked: np.ndarray, vocabulary: Vocabulary) -> Examples:
    """Inputs and targets of `rows` whose tokens at `masked` (n, longest) bool are to be predicted.

    The inputs have a sentinel for each run of masked tokens, the targets one for each run of kept tokens. If a row
    begins with a kept token, the targets are the sentinels of the inputs, each followed by the tokens that it replaces.
    """
    return Examples(replace_runs(rows, masked, vocabulary), replace_runs(rows, ~masked, vocabulary))


def run_starts(runs: np.ndarray) -> np.ndarray:
    """(n, length) bool: the first token of each run of True in `runs` (n, length) bool."""
    starts = runs.copy()
    np.greater(runs[:, 1:], runs[:, :-1], out=starts[:, 1:])
    return starts


def replace_runs(rows: Padded, runs: np.ndarray, vocabulary: Vocabulary) -> Padded:
    """`rows` with each run of `runs` (n, longest) bool replaced by a sentinel, numbered from the left, then EOS.

    This is T5's `noise_span_to_unique_sentinel` for all rows at once.
    """
    count, longest = rows.values.shape
    equally_long = bool((rows.lengths == longest).all())
    starts = run_starts(runs)
    kept = starts == runs  # the first token of a run becomes the sentinel
    kept = np.flatnonzero(kept if equally_long else kept & rows.filled)

    row_ends = np.arange(count + 1) * longest
    indices = np.flatnonzero(starts)
    firsts = np.searchsorted(indices, row_ends)
    numbers = np.arange(len(indices)) - np.repeat(firsts[:-1], np.diff(firsts))
    values = rows.values.flatten()
    values[indices] = vocabulary.first_sentinel + vocabulary.sentinel_step * numbers

    lengths = np.diff(np.searchsorted(kept, row_ends))
    width = int(lengths.max(initial=0)) + 1
    if (lengths == width - 1).all():
        replaced = np.full((count, width), vocabulary.eos, dtype=values.dtype)
        replaced[:, :-1] = values.take(kept).reshape(count, width - 1)
    else:
        replaced = np.full((count, width), vocabulary.pad, dtype=values.dtype)
        replaced[np.arange(width) < lengths[:, None]] = values.take(kept)
        replaced[np.arange(count), lengths] = vocabulary.eos
    return Padded(replaced, lengths + 1)
