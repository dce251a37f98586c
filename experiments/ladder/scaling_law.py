"""The law L = E + A · x^−α, fitted to the rungs of a ladder, and the interval of what it predicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import stdtrit

_EXPONENTS = np.geomspace(0.01, 4.0, 61)  # where the search begins
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Law:
    """L(x) = E + A · x^−α (Kaplan et al. 2020; Hoffmann et al. 2022), with 0 ≤ E. Losses are in nats per token.

    `intervals`: 95 % of `E`, `A` and `α`, in this order. `residual`: the standard deviation of the losses around the
    law, by n − 3. `bounded`: whether E or α ended at the bound of its range, so that the losses don't determine it.
    """

    E: float
    A: float
    alpha: float
    intervals: tuple[tuple[float, float], ...]
    residual: float
    degrees: int
    bounded: bool
    _covariance: tuple[tuple[float, ...], ...]  # of E, log A and α, without the factor residual²
    _unit: float  # of x, where A of the covariance is taken

    def __call__(self, x: float) -> float:
        return self.E + self.A * x**-self.alpha

    def interval(self, x: float) -> tuple[float, float]:
        """Where the loss of one more rung at `x` lies, with a probability of 95 %: the law's own uncertainty and the
        scatter of a rung around it, by a t quantile with n − 3 degrees of freedom."""
        gradient = np.array(_gradient(self.A * self._unit**-self.alpha, self.alpha, x / self._unit))
        variance = 1 + gradient @ np.array(self._covariance) @ gradient
        half = _t(self.degrees) * self.residual * math.sqrt(variance)
        return self(x) - half, self(x) + half


def fit(x: Sequence[float], losses: Sequence[float]) -> Law:
    """The law that fits `losses` at `x` by least squares, and the linearised covariance of its constants.

    Bootstraps of four or five points repeat points and come out too narrow; the t quantile with n − 3 degrees of
    freedom (12.7 at four points, 4.3 at five) doesn't hide how little they determine. Raises ValueError for fewer than
    four.
    """
    if len(x) < 4:
        raise ValueError(f"{len(x)} points; three constants and their spread need four")
    unit = math.exp(float(np.mean(np.log(x))))
    scaled, found = np.array(x) / unit, np.array(losses, dtype=float)

    def residuals(constants: np.ndarray) -> np.ndarray:
        return constants[0] + np.exp(constants[1] - constants[2] * np.log(scaled)) - found

    lowest, highest = [0.0, -50.0, 1e-3], [max(found.min(), 1e-9), 50.0, 10.0]
    start = np.clip(_start(scaled, found), np.array(lowest) + 1e-9, np.array(highest) - 1e-9)
    done = least_squares(residuals, start, bounds=(lowest, highest), x_scale="jac", xtol=1e-12, ftol=1e-12, gtol=1e-12)
    bottom, log_a, alpha = map(float, done.x)
    degrees = len(found) - 3
    residual = math.sqrt(float(np.sum(done.fun**2)) / degrees)
    jacobian = np.array([_gradient(math.exp(log_a), alpha, one) for one in scaled])
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    half = _t(degrees) * residual * np.sqrt(np.diag(covariance))
    a = math.exp(log_a) * unit**alpha
    # A is that of x in its own units, far outside the rungs: its error is that of α as well
    slope = np.array([0.0, 1.0, math.log(unit)])
    half_of_log_a = _t(degrees) * residual * math.sqrt(slope @ covariance @ slope)
    intervals = (
        (bottom - half[0], bottom + half[0]),
        (a * math.exp(-min(half_of_log_a, 500.0)), a * math.exp(min(half_of_log_a, 500.0))),
        (alpha - half[2], alpha + half[2]),
    )
    bounded = bottom < 1e-6 * float(found.min()) or not 2e-3 < alpha < 9.9
    rows = tuple(tuple(map(float, row)) for row in covariance)
    return Law(
        bottom,
        a,
        alpha,
        tuple((float(low), float(high)) for low, high in intervals),
        residual,
        degrees,
        bounded,
        rows,
        unit,
    )


def _start(x: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """The best constants over a grid of exponents: with α fixed, E and A are linear."""
    best, constants = math.inf, (0.0, 0.0, 0.1)
    for alpha in _EXPONENTS:
        design = np.stack([np.ones_like(x), x**-alpha], axis=1)
        (bottom, a), *_ = np.linalg.lstsq(design, losses, rcond=None)
        if bottom < 0:
            bottom, a = 0.0, float(losses @ design[:, 1] / (design[:, 1] @ design[:, 1]))
        error = float(np.sum((bottom + a * design[:, 1] - losses) ** 2))
        if a > 0 and error < best:
            best, constants = error, (float(bottom), math.log(a), float(alpha))
    return constants


def _gradient(a: float, alpha: float, x: float) -> tuple[float, float, float]:
    """dL/dE, dL/dlog A, dL/dα at `x`."""
    falling = a * x**-alpha
    return 1.0, falling, -falling * math.log(x)


def _t(degrees: int) -> float:
    return float(stdtrit(degrees, (1 + _CONFIDENCE) / 2))
