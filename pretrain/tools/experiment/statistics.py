"""Means, spreads and comparisons over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class Spread:
    """The mean of some runs, and their sample standard deviation (n − 1); None for one run."""

    mean: float
    deviation: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None without values."""
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        """ "3.290±0.010" """
        return self.rounded(3)

    def rounded(self, places: int) -> str:
        return f"{self.mean:.{places}f}" + ("" if self.deviation is None else f"±{self.deviation:.{places}f}")


@dataclass(frozen=True)
class Comparison:
    """A row's mean minus its baseline's, with its standard error, 95 % interval and p-value.

    The model is additive: a value is the sum of a row's mean, what its seed adds to every row, and a normal residual
    whose variance all rows share. So each row's scatter tells about the others', and few seeds suffice where there are
    many rows; with two rows it is the paired t-test. Student's t, two-sided. None where nothing is left to estimate the
    variance from.
    """

    difference: float
    pairs: int
    error: float | None = None
    degrees_of_freedom: int = 0
    t: float | None = None
    p: float | None = None
    interval: tuple[float, float] | None = None

    def resolution(self, comparisons: int) -> float | None:
        """The least difference with a p-value below 0.05 after it is adjusted for being one of `comparisons`."""
        if self.error is None:
            return None
        return float(stdtrit(self.degrees_of_freedom, 1 - 0.025 / comparisons)) * self.error


def compare(rows: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Comparison]:
    """Compares each row's values, by seed, with those of `baseline`. Left out: rows without a seed that it has too.

    >>> compare({"base": {0: 3.1, 1: 3.3, 2: 3.4}, "row": {0: 3.0, 1: 3.2, 2: 3.1}}, "base")["row"]
    Comparison(difference=-0.1666…, pairs=3, error=0.0666…, degrees_of_freedom=2, t=-2.5, p=0.1296…,
    interval=(-0.4535…, 0.1201…))
    """
    own = rows.get(baseline, {})
    pairs = {name: len(values.keys() & own.keys()) for name, values in rows.items() if name != baseline}
    names = [baseline, *(name for name, number in pairs.items() if number)]
    cells = [(name, seed) for name in names for seed in rows.get(name, ())]
    if len(names) == 1:
        return {}
    effects = (*names, *sorted({seed for _, seed in cells}))
    design = np.array([[float(one in cell) for one in effects] for cell in cells])
    values, inverse = np.array([rows[name][seed] for name, seed in cells]), np.linalg.pinv(design)
    free = len(cells) - int(np.linalg.matrix_rank(design))
    scatter = float(np.linalg.norm(values - design @ inverse @ values)) / math.sqrt(max(free, 1))
    if scatter <= 1e-12 * float(np.linalg.norm(values)):  # rounding alone
        scatter = 0.0
    found = {}
    for place, name in enumerate(names[1:], start=1):
        weights = inverse[place] - inverse[0]  # of the values, in the difference of the rows
        difference, error = float(weights @ values), float(np.linalg.norm(weights)) * scatter
        found[name] = Comparison(difference, pairs[name])
        if free:
            certain = math.copysign(math.inf, difference) if abs(difference) >= 1e-12 else 0.0
            t = difference / error if error else certain
            p, half = 2 * float(stdtr(free, -abs(t))), float(stdtrit(free, 0.975)) * error
            interval = difference - half, difference + half
            found[name] = Comparison(difference, pairs[name], error, free, t, p, interval)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, adjusted for being one of several (Holm 1979): below α, the chance of any false one is below α.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        highest = adjusted[number] = max(highest, min(1.0, (len(p_values) - place) * p_values[number]))
    return adjusted
