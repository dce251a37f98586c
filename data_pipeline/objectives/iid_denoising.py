"""I.i.d. denoising: each token is masked by itself (Raffel et al. 2020, section 3.1.4; T5's `iid_denoising`)."""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.objectives.objective import Examples, Objective, Padded
from data_pipeline.objectives.randomness import random_bits
from data_pipeline.objectives.sentinels import run_starts, with_sentinels
from data_pipeline.text.vocabulary import Vocabulary

_MASK = 0  # stream of random numbers
_OVERFLOW = 1e-6


class IidDenoising(Objective):
    """Settings of i.i.d. denoising.

    `inputs_length`: the most tokens the encoder sees, end mark included. `noise_density`: probability that a token is
    masked, independently of all others.

    Each run of masked tokens becomes one sentinel, as in span corruption with a rolled mask: inputs and targets number
    their own runs, and what one side spells out is a sentinel in the other.

        row      Thank you for inviting me to your party last week
        inputs   Thank <0> for <1> to your party <2> week </s>
        targets  <0> you <1> inviting me <2> last <3> </s>

    The number of runs is random and its worst case, every other token, never occurs: 256 in a row of 511, with a mean
    of 65. A row is therefore given as many sentinels and as long targets as suffice but for one row in a million, 97
    and 212 here, so that T5's 100 sentinels do; there, the tokens stay unmasked from where one more would not fit.
    A row of which nothing is masked has only the end mark as its targets.
    """

    name: Literal["iid_denoising"] = "iid_denoising"
    inputs_length: int = Field(512, ge=2)
    noise_density: float = Field(0.15, gt=0, lt=1)

    @property
    def raw_length(self) -> int:
        """Tokens of a row before masking: with the end mark they fill the inputs if each masked run is of one token."""
        return self.inputs_length - 1

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets). The targets may have one run of kept tokens more than there are masked ones."""
        return self.inputs_length, self._most_added + 2

    @property
    def sentinels(self) -> int:
        """One for each run of masked tokens or, on the other side, of kept ones."""
        return self._most_runs + 1

    def apply(
        self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Mapping[str, np.ndarray]
    ) -> Examples:
        """Inputs and targets of `rows`, each masked as its key says."""
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
        """Ends the masking of each row of `masked` (n, length), in place, where its limits are reached."""
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
        """Runs of masked tokens that a row has at most."""
        return self._most(0)

    @cached_property
    def _most_added(self) -> int:
        """Masked tokens and runs of them, together, that a row has at most."""
        return self._most(1)

    def _most(self, token: int) -> int:
        """What runs + `token` × masked tokens of a full row exceeds with a probability of no more than 10⁻⁶.

        Token by token, the probability of every count, apart for rows that end with a kept and with a masked token.
        """
        after_kept = np.zeros((token + 1) * self.raw_length + 2)
        after_kept[0] = 1.0
        after_masked = np.zeros_like(after_kept)
        for _ in range(self.raw_length):
            first, further = np.roll(after_kept, 1 + token), np.roll(after_masked, token)
            after_kept = (1 - self.noise_density) * (after_kept + after_masked)
            after_masked = self.noise_density * (first + further)
        tail = np.cumsum((after_kept + after_masked)[::-1])[::-1]  # [k]: the probability of k or more
        return int(np.flatnonzero(tail > _OVERFLOW)[-1])
