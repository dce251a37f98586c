"""Mixtures: the corpus at each position, computed from the position alone."""

from collections.abc import Sequence

import numpy as np

_CYCLES = (10_000, 100_000, 1_000_000)  # rows; the shortest cycle in which every corpus has a row is used


def too_light(weights: Sequence[float]) -> list[int]:
    """Indices of corpora whose share rounds to 0 rows even in the longest cycle: about half a millionth or less."""
    return np.flatnonzero(_rows(weights, _CYCLES[-1]) == 0).tolist()


def rates(rows: Sequence[int], weights: Sequence[float], limit: int | None, temperature: float) -> list[float]:
    """T5's mixing rates (Raffel et al. 2020, section 3.5.2), relative to one another.

    Each corpus has weight · min(rows, limit)^(1 / temperature).

    Rows [900, 100] with a limit of 400  ->  [400, 100]; at temperature 2  ->  [20, 10]
    """
    return [
        weight * min(of_corpus, limit or of_corpus) ** (1 / temperature)
        for of_corpus, weight in zip(rows, weights, strict=True)
    ]


class Mixture:
    """Assigns positions to corpora in proportion to `weights`, as evenly as possible, in a repeating cycle.

    Shares are rounded to whole rows of the cycle. Raises ValueError if a corpus is `too_light`.
    """

    def __init__(self, weights: Sequence[float]):
        counts = next((counts for cycle in _CYCLES if (counts := _rows(weights, cycle)).all()), None)
        if counts is None:
            raise ValueError(f"weights {list(weights)}: a share rounds to no row in {_CYCLES[-1]}")
        # the k-th turn of a corpus with n turns in the cycle is due at (k + 1/2) / n of it
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        turn = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(due, kind="stable")
        self._cycle, self._counts = len(order), counts
        self._owner, self._turn = np.repeat(np.arange(len(counts)), counts)[order], turn[order]

    def consumed(self, position: int) -> list[int]:
        """How many rows of each corpus come before `position`."""
        cycles, rest = divmod(position, self._cycle)
        before = np.bincount(self._owner[:rest], minlength=len(self._counts))
        return (cycles * self._counts + before).tolist()

    def miscount(self, consumed: list[int], position: int) -> str | None:
        """How `consumed` rows of each corpus differ from those before `position`; None if they are the same."""
        expected = self.consumed(position)
        if consumed == expected:
            return None
        return f"{consumed} rows consumed, one number for each corpus, expected {expected} at position {position}"

    def deal(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus (n,), position within that corpus's sequence (n,)) for each of `positions` (n,)."""
        cycles, rest = np.divmod(positions, self._cycle)
        owner = self._owner[rest]
        return owner, cycles * self._counts[owner] + self._turn[rest]


def _rows(weights: Sequence[float], cycle: int) -> np.ndarray:
    """Rows of a cycle for each corpus, by largest remainder: weights [5, 3, 2] of 9 rows  ->  [4, 3, 2]"""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * cycle
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: cycle - counts.sum()]] += 1
    return counts
