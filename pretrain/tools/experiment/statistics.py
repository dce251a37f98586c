"""Means, spreads and paired comparisons over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


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
        return f"{self.mean:.3f}" + ("" if self.deviation is None else f"±{self.deviation:.3f}")


@dataclass(frozen=True)
class Comparison:
    """The mean of paired differences, a row's minus its baseline's, and its 95 % interval and p-value.

    The test is Student's, paired, two-sided: t = mean / (deviation / √n) with n − 1 degrees of freedom. It assumes that
    differences are normal. None with fewer than two pairs.
    """

    difference: float
    pairs: int
    t: float | None
    p: float | None
    interval: tuple[float, float] | None


def compare(row: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison | None:
    """Compares values by seed; None if no seed is in both.

    >>> compare({0: 3.0, 1: 3.2, 2: 3.1}, {0: 3.1, 1: 3.3, 2: 3.4})
    Comparison(difference=-0.1666…, pairs=3, t=-2.5, p=0.1296…, interval=(-0.4535…, 0.1201…))
    """
    from scipy.special import stdtr, stdtrit  # slow to import

    differences = [row[seed] - baseline[seed] for seed in sorted(row.keys() & baseline.keys())]
    number = len(differences)
    if not number:
        return None
    mean = fmean(differences)
    if number < 2:
        return Comparison(mean, number, None, None, None)
    error = stdev(differences) / math.sqrt(number)
    if error == 0:
        return Comparison(mean, number, math.copysign(math.inf, mean) if mean else 0.0, float(mean == 0), (mean, mean))
    t, half = mean / error, float(stdtrit(number - 1, 0.975)) * error
    return Comparison(mean, number, t, 2 * float(stdtr(number - 1, -abs(t))), (mean - half, mean + half))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, adjusted for being one of several (Holm 1979): below α, the chance of any false one is below α.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        highest = adjusted[number] = max(highest, min(1.0, (len(p_values) - place) * p_values[number]))
    return adjusted
