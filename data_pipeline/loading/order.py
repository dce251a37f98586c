"""The order of training: the corpus and the row at each position are computed, not stored.

In a mixture every corpus has exactly its share, however small: the number of its rows before a position p is p times
its share, rounded. A share of 1e-6 has its rows at positions 500,000, 1,500,000, … .

In each epoch of a corpus the blocks are permuted by (seed, epoch) and concatenated. That sequence of rows is cut into
equal ranges, and the rows of these lanes alternate: neighbours in a batch come from different blocks. Lanes begin at
different rows of their blocks, so that no two need a new block at the same moment. Rows are also permuted inside each
block.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np

from data_pipeline.corpus import Blocks
from data_pipeline.objectives.randomness import permutation, row_keys

_UNIT = 2**64  # shares are fixed-point numbers; at position 2^63 they are exact to half a row
_HALF = 2**63


def rates(sizes: Sequence[int], weights: Sequence[float], limit: int | None, temperature: float) -> list[float]:
    """T5's mixing rates (Raffel et al. 2020, section 3.5.2), relative to one another.

    Each corpus has weight · min(size, limit)^(1 / temperature). Sizes are in rows or in tokens.

    Sizes [900, 100] with a limit of 400  ->  [400, 100]; at temperature 2  ->  [20, 10]
    """
    return [weight * min(size, limit or size) ** (1 / temperature) for size, weight in zip(sizes, weights, strict=True)]


def rates_of_rows(shares: Sequence[float], rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """How often rows are drawn, relative to one another, if `shares` are to be the shares of the tokens.

    A corpus with `rows` rows of `tokens` tokens in all gives tokens / rows of them with each row.

    Shares [1, 1] of [10, 10] rows with [5000, 1000] tokens  ->  [0.002, 0.01]: five of the second's rows for each of
    the first's.
    """
    return [share * of_rows / of_tokens for share, of_rows, of_tokens in zip(shares, rows, tokens, strict=True)]


class Mixture:
    """Assigns positions to corpora in proportion to `weights`, each as evenly as possible.

    Corpora are dealt one after the other. Of the first n positions, ⌊n · share + 1/2⌋ are the first corpus's. Of the
    positions that it leaves, the second corpus has those by the same rule, with its share among the corpora that are
    left, and so on. The shares are exact fractions of the weights, rounded down to multiples of 2^-64.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(weight) for weight in weights]
        left = list(accumulate(reversed(exact)))[::-1]  # the weights of a corpus and of all behind it
        self._shares = [max(1, int(weight / rest * _UNIT)) for weight, rest in zip(exact[:-1], left, strict=False)]

    def consumed(self, position: int) -> list[int]:
        """How many rows of each corpus come before `position`."""
        counts, left = [], position
        for share in self._shares:
            counts.append((left * share + _HALF) // _UNIT)
            left -= counts[-1]
        return [*counts, left]

    def miscount(self, consumed: list[int], position: int) -> str | None:
        """How `consumed` rows of each corpus differ from those before `position`; None if they are the same."""
        expected = self.consumed(position)
        if consumed == expected:
            return None
        return f"{consumed} rows consumed, one number for each corpus, expected {expected} at position {position}"

    def deal(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus (n,), position within that corpus's sequence (n,)) for each of `positions` (n,)."""
        within = np.array(positions, dtype=np.int64)
        corpora = np.full(len(within), len(self._shares), dtype=np.int64)
        left = np.arange(len(within))  # positions that no corpus has taken yet
        for corpus, share in enumerate(self._shares):
            index = within[left]
            before = _times(index, share)
            taken = _times(index + 1, share) > before
            corpora[left[taken]] = corpus
            within[left] = np.where(taken, before, index - before)
            left = left[~taken]
        return corpora, within


def _times(numbers: np.ndarray, share: int) -> np.ndarray:
    """⌊numbers · share / 2^64 + 1/2⌋ (n,) of numbers (n,), by Python's integers: the product has 127 bits."""
    return ((numbers.astype(object) * share + _HALF) // _UNIT).astype(np.int64)


class EpochOrder:
    """The row at each position of one epoch of one split."""

    def __init__(self, blocks: Blocks, lanes: int, seed: int, epoch: int):
        self._rows = blocks.rows
        self._first_row = blocks.first_row
        self._total = int(blocks.rows.sum())
        self._lanes = lanes
        count = len(blocks.rows)
        self._permuted = permutation(int(row_keys(seed, "order/blocks", epoch, np.array([0]))[0]), count)
        self._ends = np.cumsum(blocks.rows[self._permuted])
        self._block_keys = row_keys(seed, "order/rows", epoch, np.arange(count))
        self._within = lru_cache(maxsize=2 * lanes + 2)(self._permutation_of_block)

    def row_ids(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64: ids of the rows at `positions` (n,), each below the number of rows."""
        sequence = self._sequence(positions)
        index = np.searchsorted(self._ends, sequence, side="right")
        blocks = self._permuted[index]
        inside = sequence - (self._ends[index] - self._rows[blocks])
        rows = [self._within(int(block))[offset] for block, offset in zip(blocks, inside, strict=True)]
        return self._first_row[blocks] + np.array(rows, dtype=np.int64)

    def _sequence(self, positions: np.ndarray) -> np.ndarray:
        """Indices in the sequence of permuted blocks. Position p is row `p div n` of lane `p mod n`, of n.

        If the rows don't divide evenly, the first lanes are one row longer, and those rows come last.
        """
        share, longer = divmod(self._total, self._lanes)
        tail = positions >= share * self._lanes
        lane = np.where(tail, positions - share * self._lanes, positions % self._lanes)
        depth = np.where(tail, share, positions // self._lanes)
        return lane * share + np.minimum(lane, longer) + depth

    def _permutation_of_block(self, block: int) -> np.ndarray:
        return permutation(int(self._block_keys[block]), int(self._rows[block]))
