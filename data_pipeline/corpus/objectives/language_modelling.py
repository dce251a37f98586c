"""Language modelling: each token is predicted from those before it. Also with a masked span at the end of a row, and
with the beginning of a row for the encoder (Raffel et al. 2020, section 3.2.3)."""

from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

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


class NextToken(Objective):
    """The targets are the inputs shifted by one token."""

    length: int = Field(1024, gt=0, le=LONGEST)
    """Number of tokens of the inputs, and of the targets."""

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
    """Whether the first token of a document, which follows EOS or BOS, has a loss."""

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """The inputs are all but the last token of each row, the targets all but the first. Nothing is random."""
        examples = shifted(rows, vocabulary.pad)
        if self.after_marks:
            return examples
        special = [id_ for id_ in (vocabulary.eos, vocabulary.bos) if id_ is not None]
        return replace(examples, predicted=examples.inputs.filled & ~np.isin(examples.inputs.values, special))


def shifted(rows: Padded, pad: int) -> Examples:
    """The tokens of each row but the last as inputs, and but the first as targets."""
    lengths = rows.lengths - 1
    inputs, targets = (Padded(values.copy(), lengths) for values in (rows.values[:, :-1], rows.values[:, 1:]))
    inputs.values[~inputs.filled] = targets.values[~targets.filled] = pad
    return Examples(inputs, targets)


_CHOICE, _CUTS = 0, 1  # streams of random numbers
_MARKS = 3


class CausalInfilling(NextToken):
    """Causal language modelling in which some rows are cut at two random places, and their middle comes last. A
    decoder-only model learns to fill a span from both sides.

    With `<k>` for sentinel k; the row loses its last three tokens to keep its length:

        row      Thank you for inviting me to your party last week
        as read  <0> Thank you for <1> your party <2> inviting me to
        inputs   <0> Thank you for <1> your party <2> inviting me
        targets  Thank you for <1> your party <2> inviting me to

    Any part may be empty. Rows of fewer than five tokens stay as they are.
    """

    name: Literal["causal_infilling"] = "causal_infilling"
    length: int = Field(1024, ge=4, le=LONGEST)
    fim_rate: float = Field(0.5, gt=0, le=1)
    """The share of rows whose middle comes last. The other rows are as in `causal_lm`."""

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
        return shifted(Padded(values, rows.lengths), vocabulary.pad)

    def _with_the_middle_last(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary) -> Padded:
        text = rows.lengths - _MARKS
        bits = random_bits(keys, _CUTS, 2)
        start, end = np.sort(np.stack([uniform(bits[:, cut], text + 1) for cut in range(2)]), axis=0)
        first, second, third = map(vocabulary.sentinel, range(_MARKS))
        before, middle = Stretch(np.zeros_like(start), start), Stretch(start, end - start)
        return concatenated(rows, vocabulary.pad, first, before, second, Stretch(end, text - end), third, middle)


_SPLIT = 0  # stream of random numbers


class PrefixLM(Objective):
    """Prefix language modelling: a row is split at random, and both parts get an EOS token.

    The decoder's part is uniform over 1 … 2 · `noise_density` · `length` − 1 tokens.

        row      Thank you for inviting me to your party last week
        inputs   Thank you for inviting me to your </s>
        targets  party last week </s>

    With `packed`, a row holds two examples of `length` − 2 tokens. The second is split so that it fills the room that
    the first leaves (T5's `pack_prefix_lm_encoder_decoder`): whatever the split, inputs and targets have `length`
    tokens each, without padding. T5 marks only the ends of documents; here each part has its EOS, as without
    packing, and `length` counts them. A row of 12 tokens, split at 2 and 6 − 2, with the segments below:

        row      Thank you for inviting me to | your party last week is over
        inputs   Thank you </s> your party last week </s>
                 1     1   1    2    2     2    2    2
        targets  for inviting me to </s> is over </s>
                 1   1        1  1  1    2  2    2
    """

    name: Literal["prefix_lm"] = "prefix_lm"
    length: int = Field(512, ge=2, le=LONGEST)
    """Maximum number of tokens of the encoder's input, EOS included; also the length of a row that isn't packed."""
    packed: bool = False
    """Pack two examples into a row; together they fill inputs and targets without padding."""
    noise_density: float = Field(0.5, gt=0, le=0.5)
    """The mean share of a row that goes to the decoder. T5: 0.5, so the split is uniform over the row. UL2's S-denoiser
    (Tay et al. 2022, table 1): 0.25."""

    @property
    def packings(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("concatenate",) if self.packed else Objective.packings

    @model_validator(mode="after")
    def _is_packable(self) -> "PrefixLM":
        if self.packed and self.noise_density != 0.5:
            needed = "packed rows need 0.5, since half of their tokens go to the decoder"
            raise ValueError(f"noise_density: {needed}, got {self.noise_density:g}")
        if self.packed and self.length < 4:
            raise ValueError(f"length: {self.length} tokens can't hold parts of two examples and their EOS tokens")
        return self

    @property
    def raw_length(self) -> int:
        return 2 * (self.length - 2) if self.packed else self.length

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): 512 and 512 by default, 512 and 256 at a density of 0.25."""
        if self.packed:
            return self.length, self.length
        return self.length, int(self._most_left(np.array(self.length))) + 1

    def accepts(self, length: int) -> bool:
        """Whether `length` tokens can be split; if packed, into two examples of the same length."""
        if self.packed:
            return 4 <= length <= self.raw_length and length % 2 == 0
        return 2 <= length <= self.raw_length

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        bits = random_bits(keys, _SPLIT, 1)[:, 0]
        pad, eos = vocabulary.pad, vocabulary.eos
        start = np.zeros_like(rows.lengths)
        if not self.packed:
            left = 1 + uniform(bits, self._most_left(rows.lengths))
            right = rows.lengths - left
            parts = Stretch(start, right), Stretch(right, left)
            inputs, targets = (concatenated(rows, pad, part, eos) for part in parts)
            return Examples(inputs, targets)
        half = rows.lengths // 2
        split = 1 + uniform(bits, half - 1)
        rest = half - split
        inputs = concatenated(rows, pad, Stretch(start, split), eos, Stretch(half, rest), eos)
        targets = concatenated(rows, pad, Stretch(split, rest), eos, Stretch(half + rest, split), eos)
        segments = _halves(inputs, split + 1), _halves(targets, rest + 1)
        return Examples(inputs, targets, input_segments=segments[0], target_segments=segments[1])

    def _most_left(self, lengths: np.ndarray) -> np.ndarray:
        """The most tokens (int64) that go to the decoder, for rows of `lengths`."""
        return np.clip(np.rint(2 * self.noise_density * lengths).astype(np.int64) - 1, 1, lengths - 1)


class FullLM(Objective):
    """Language modelling without a prefix: the encoder sees only an EOS token (T5's `full_lm`).

    row      Thank you for inviting me
    inputs   </s>
    targets  Thank you for inviting me </s>
    """

    name: Literal["full_lm"] = "full_lm"
    length: int = Field(512, ge=2, le=LONGEST)
    """Number of tokens of the targets, EOS included."""

    @property
    def raw_length(self) -> int:
        """Tokens of a row: the targets without their EOS."""
        return self.length - 1

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.length

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """The inputs are EOS tokens (n, 1), the targets the rows with EOS tokens. Nothing is random."""
        ends = np.full((len(rows.lengths), 1), vocabulary.eos, dtype=rows.values.dtype)
        whole = Stretch(np.zeros_like(rows.lengths), rows.lengths)
        return Examples(Padded.full(ends), concatenated(rows, vocabulary.pad, whole, vocabulary.eos))


def _halves(rows: Padded, first: np.ndarray) -> np.ndarray:
    """(n, width) uint8: 1 for the first `first` (n,) tokens of each row, 2 for the others, 0 at padding."""
    return rows.filled * (1 + (np.arange(rows.values.shape[1]) >= first[:, None])).astype(np.uint8)
