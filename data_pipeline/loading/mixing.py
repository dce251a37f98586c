"""Mixtures: which corpus stands at which position, by a closed function of the position."""

import numpy as np

_CYCLE = 10_000  # weights are rounded to ten-thousandths


class Mixture:
    """Deals positions to corpora in proportion to `weights`, as evenly as possible, in a cycle that repeats."""

    def __init__(self, weights: list[float]):
        shares = np.array(weights, dtype=np.float64) / sum(weights)
        exact = shares * _CYCLE
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: _CYCLE - counts.sum()]] += 1
        # the k-th turn of a corpus with n turns in the cycle is due at (k + 1/2) / n of it
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count])
        owner = np.repeat(np.arange(len(counts)), counts)
        self._owner = owner[np.argsort(due, kind="stable")]
        self._per_cycle = counts
        turns = np.zeros((_CYCLE + 1, len(counts)), dtype=np.int64)
        turns[1:] = np.cumsum(self._owner[:, None] == np.arange(len(counts)), axis=0)
        self._before = turns

    def consumed(self, position: int) -> list[int]:
        """How many rows of each corpus stand before `position`."""
        cycles, rest = divmod(position, _CYCLE)
        return (cycles * self._per_cycle + self._before[rest]).tolist()

    def deal(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus (n,), place in that corpus's own sequence (n,)) of `positions` (n,)."""
        cycles, rest = np.divmod(positions, _CYCLE)
        owner = self._owner[rest]
        return owner, cycles * self._per_cycle[owner] + self._before[rest, owner]
