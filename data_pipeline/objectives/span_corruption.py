"""Span corruption: T5's objective (Raffel et al. 2020, section 3.1.4; `random_spans_noise_mask` and its length helper).

Worked example, with `<k>` for sentinel k and `</s>` for the end mark:

    row      Thank you for inviting me to your party last week
    inputs   Thank you <0> me to your party <1> week </s>
    targets  <0> for inviting <1> last </s>
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from data_pipeline.objectives.objective import Examples, Objective, Padded, by_length
from data_pipeline.objectives.randomness import random_bits
from data_pipeline.vocabulary import Vocabulary

_NOISE, _KEPT = 0, 1  # streams of random numbers: the two segmentations are independent


class SpanCorruption(Objective):
    """Settings of span corruption, and the lengths that follow from them.

    `inputs_length`: tokens the encoder sees, end mark included; rows are cut so long that nothing is padded.
    `noise_density`: share of a row's tokens that is masked. `mean_span_length`: in tokens.
    """

    name: Literal["span_corruption"] = "span_corruption"
    inputs_length: PositiveInt = 512
    noise_density: float = Field(0.15, gt=0, lt=1)
    mean_span_length: float = Field(3.0, ge=1)

    @model_validator(mode="after")
    def _spans_fit(self) -> "SpanCorruption":
        if self.raw_length < 2:
            raise ValueError(f"inputs_length: {self.inputs_length} leaves no room for a masked span")
        noise, spans = self._noise(self.raw_length)
        if not self.accepts(self.raw_length):
            raise ValueError(
                f"noise_density: {spans} spans can't be kept apart by the {self.raw_length - noise} tokens left; "
                "lower it or raise mean_span_length"
            )
        return self

    @cached_property
    def raw_length(self) -> int:
        """Tokens of a row before masking: 568 for 512 inputs, density 0.15, mean span 3."""
        length = self.inputs_length - 1
        while self._corrupted_lengths(length + 1)[0] <= self.inputs_length:
            length += 1
        return length - self._excess(length)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): 512 and 114 for T5's defaults. As in T5's helper, rounding may leave the last position of
        the targets empty at density 0.5."""
        excess = self._excess(self.raw_length + 1)
        return self.inputs_length, self._corrupted_lengths(self.raw_length + excess)[1] - excess

    @property
    def sentinels(self) -> int:
        """Masked spans of a row; each takes one sentinel."""
        return self._noise(self.raw_length)[1]

    def accepts(self, length: int) -> bool:
        """Whether a row of `length` tokens can be masked at all: its spans need tokens to keep them apart."""
        noise, spans = self._noise(max(length, 2))
        return length >= 2 and spans <= length - noise

    def apply(
        self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Mapping[str, np.ndarray]
    ) -> Examples:
        """Inputs and targets of `rows`, each masked as its key says.

        Rows of one length all have exactly the same number of masked tokens and spans; token 0 is always kept and the
        last is always masked. Span k is replaced by sentinel k in the inputs; the targets are the same sentinels, each
        followed by its span. Both end with the end mark.
        """
        first_sentinel, eos = vocabulary.first_sentinel, vocabulary.eos

        def corrupt(rows: np.ndarray, keys: np.ndarray) -> Examples:
            length = rows.shape[1]
            noise, spans = self._noise(length)
            mask = _noise_mask(keys, length, noise, spans)
            return Examples(
                Padded.full(_replace(rows, mask, length - noise + spans, first_sentinel, eos)),
                Padded.full(_replace(rows, ~mask, noise + spans, first_sentinel, eos)),
            )

        return by_length(rows, keys, vocabulary.pad, corrupt)

    def _noise(self, length: int) -> tuple[int, int]:
        """(masked tokens, spans) in a row of `length`. The reference multiplies in float32, so that is kept."""
        noise = int(np.clip(np.round(np.float32(length) * np.float32(self.noise_density)), 1, length - 1))
        spans = max(1, int(np.round(np.float32(noise) / np.float32(self.mean_span_length))))
        return noise, spans

    def _excess(self, length: int) -> int:
        """1 where density 0.5 would make the targets longer than the inputs: the helper then takes a token less."""
        inputs, targets = self._corrupted_lengths(length)
        return int(self.noise_density == 0.5 and inputs <= self.inputs_length and targets > inputs)

    def _corrupted_lengths(self, length: int) -> tuple[int, int]:
        noise, spans = self._noise(max(length, 2))
        return length - noise + spans + 1, noise + spans + 1


def _segmentation(keys: np.ndarray, stream: int, items: int, parts: int) -> np.ndarray:
    """(n, parts) int64: `items` cut into non-empty `parts`, every way equally likely: parts − 1 distinct cuts."""
    bits = random_bits(keys, stream, items - 1)
    chosen = np.argpartition(bits, parts - 2, axis=1)[:, : parts - 1] if parts > 1 else bits[:, :0].astype(np.int64)
    cuts = np.sort(chosen, axis=1) + 1
    edges = np.zeros((len(keys), parts + 1), dtype=np.int64)
    edges[:, 1:-1] = cuts
    edges[:, -1] = items
    return np.diff(edges, axis=1)


def _noise_mask(keys: np.ndarray, length: int, noise: int, spans: int) -> np.ndarray:
    """(n, length) bool, True where masked: kept and masked segments alternate, a kept one first."""
    kept = _segmentation(keys, _KEPT, length - noise, spans)
    masked = _segmentation(keys, _NOISE, noise, spans)
    lengths = np.stack([kept, masked], axis=2).reshape(-1)
    pattern = np.tile(np.array([False, True]), len(keys) * spans)
    return np.repeat(pattern, lengths).reshape(len(keys), length)


def _replace(rows: np.ndarray, mask: np.ndarray, length: int, first_sentinel: int, eos: int) -> np.ndarray:
    """(n, length + 1): each run of `mask` becomes one sentinel, numbered from the left; `eos` ends the row."""
    starts = mask.copy()
    starts[:, 1:] &= ~mask[:, :-1]
    sentinels = first_sentinel + 1 - np.cumsum(starts, axis=1, dtype=np.int64)
    replaced = np.where(starts, sentinels, rows).astype(rows.dtype)
    out = np.full((len(rows), length + 1), eos, dtype=rows.dtype)
    out[:, :-1] = replaced[~mask | starts].reshape(len(rows), length)
    return out
