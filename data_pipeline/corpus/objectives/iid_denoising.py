"""I.i.d. denoising: each token is masked independently (Raffel et al. 2020, section 3.1.4; T5's `iid_denoising`)."""

from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.corpus.objectives.objective import LONGEST, Columns, Examples, Objective, Padded
from data_pipeline.corpus.objectives.randomness import random_bits
from data_pipeline.corpus.objectives.span_corruption import run_starts, with_sentinels
from data_pipeline.text.vocabulary import Vocabulary

_MASK = 0  # stream of random numbers
_OVERFLOW = 1e-6


class IidDenoising(Objective):
    """I.i.d. denoising: each token is masked independently of all others.

    Each run of masked tokens becomes one sentinel, as in span corruption with a rolled mask: inputs and targets number
    their own runs, and a run of tokens on one side is a sentinel on the other.

        row      Thank you for inviting me to your party last week
        inputs   Thank <0> for <1> to your party <2> week </s>
        targets  <0> you <1> inviting me <2> last <3> </s>

    The number of runs is random. A row of 511 tokens has 65 runs on average; 256 runs, every other token, practically
    never occur. So rows have enough sentinels and target tokens for all but one row in a million, here 97 and 212, and
    T5's 100 sentinels suffice. In that one row, masking stops before the token that doesn't fit. If no token is masked,
    the targets are only EOS.
    """

    name: Literal["iid_denoising"] = "iid_denoising"
    inputs_length: int = Field(512, ge=2, le=LONGEST)
    """Maximum number of tokens of the encoder's input, EOS included."""
    noise_density: float = Field(0.15, gt=0, lt=1)
    """Probability that a token is masked."""

    @property
    def raw_length(self) -> int:
        """Tokens of a row before masking. With EOS, they fill the inputs if each masked run has one token."""
        return self.inputs_length - 1

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets). The targets may have one run of kept tokens more than masked runs, and have EOS."""
        return self.inputs_length, self._most_added + 2

    @property
    def sentinels(self) -> int:
        """One for each run of masked tokens in the inputs, or of kept tokens in the targets."""
        return self._most_runs + 1

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        below = np.uint64(int(self.noise_density * 2**64))
        masked = (random_bits(keys, _MASK, rows.values.shape[1]) < below) & rows.filled
        self._unmask_overflow(masked)
        examples = with_sentinels(rows, masked, vocabulary)
        targets, untouched = examples.targets, ~masked.any(axis=1)
        if untouched.any():
            targets.values[untouched] = vocabulary.pad
            targets.values[untouched, 0] = vocabulary.eos
            targets.lengths[untouched] = 1
        return examples

    def _unmask_overflow(self, masked: np.ndarray) -> None:
        """Unmasks in place what is behind the limits of each row of `masked` (n, length)."""
        starts = run_starts(masked)
        runs = np.count_nonzero(starts, axis=1)
        added = runs + np.count_nonzero(masked, axis=1)
        over = np.flatnonzero((runs > self._most_runs) | (added > self._most_added))
        if len(over):
            runs_so_far = np.cumsum(starts[over], axis=1)
            added_so_far = runs_so_far + np.cumsum(masked[over], axis=1)
            masked[over] &= (runs_so_far <= self._most_runs) & (added_so_far <= self._most_added)

    @cached_property
    def _most_runs(self) -> int:
        """The most runs of masked tokens in a row."""
        return self._most(0)

    @cached_property
    def _most_added(self) -> int:
        """The most masked tokens and runs of them, added, in a row."""
        return self._most(1)

    def _most(self, token: int) -> int:
        """The limit that runs + `token` × masked tokens of a full row exceed with a probability of at most 10⁻⁶.

        Probabilities follow from the generating function at the roots of unity, where a token is a matrix of two
        states, kept and masked, and a row is a power of the matrix.
        """
        length, density = self.raw_length, self.noise_density
        size = 1 << ((length + 1) // 2 + token * length).bit_length()  # above the largest count
        unity = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
        of_token = np.empty((len(unity), 2, 2), dtype=complex)
        of_token[:, 0] = 1 - density
        of_token[:, 1, 0], of_token[:, 1, 1] = density * unity ** (1 + token), density * unity**token
        of_row = np.linalg.matrix_power(of_token, length)
        tail = np.cumsum(np.fft.irfft(of_row[:, :, 0].sum(axis=1), size)[::-1])[::-1]  # [k]: of k or more
        return int(np.flatnonzero(tail > _OVERFLOW)[-1])
