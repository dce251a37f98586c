"""Which rank is slow, and what of it, from the times of a few steps of all ranks. Pure functions.

A rank is compared in each step with the lower median of all ranks: with two ranks, with the faster one. What all ranks
share, such as longer rows in a step, then cancels out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

DATA, COMPUTE, WHOLE = range(3)  # as in zero.step_times
WINDOW = 16  # steps that a judgement is made from
_SPIKES = 2  # the longest waits for rows of a window, which don't count: a new block, a cache that fills
_LEAST_SECONDS = 5e-4  # a step: less is nothing to name
_NAMED, _OVER = 0.7, 0.35  # of the logarithm of the factor to find, since a window is noisy

Cause = Literal["device", "loader", "store"]


@dataclass(frozen=True)
class Slow:
    """The slow part: the device or the loader of `rank`, or the store, which all ranks wait for (`rank` None).

    - `factor`: of a device, its time of compute by the others'; of a loader and the store, a step's time by that
      without the wait for rows.
    - `sure`: true if `factor` stands out from the noise of the steps.
    """

    cause: Cause
    rank: int | None
    factor: float
    sure: bool


def compared(times: np.ndarray, remote: bool) -> list[Slow]:
    """Each rank in each respect, by `times` (steps, ranks, 3) in seconds: `DATA`, `COMPUTE` and `WHOLE`.

    `remote`: true if rows come from a remote store. One rank alone has nothing to be compared with.
    """
    store = [_store(times)] if remote else []
    return store if times.shape[1] == 1 else [*_devices(times), *_loaders(times), *store]


def named(found: list[Slow], factor: float, before: Slow | None) -> Slow | None:
    """The part to name as slow by `factor`, if any. The one that was named `before` is kept until it is as fast as
    others, or something else is slower by as much again."""
    new = max((one for one in found if one.sure), key=lambda one: one.factor, default=None)
    if new and new.factor < factor**_NAMED:
        new = None
    now = next((one for one in found if before and (one.cause, one.rank) == (before.cause, before.rank)), None)
    if now is None or now.factor < factor**_OVER:
        return new
    return new if new and new.factor >= now.factor * factor**_NAMED else now


def waiting(times: np.ndarray) -> float:
    """The share of a step's time that ranks wait for the slowest, the mean over ranks and steps."""
    own = times[:, :, DATA] + times[:, :, COMPUTE]
    most = own.max(axis=1)
    return float((most - own.mean(axis=1)).sum() / max(most.sum(), 1e-9))


def _devices(times: np.ndarray) -> Iterator[Slow]:
    compute = np.maximum(times[:, :, COMPUTE], 1e-9)
    typical = _lower_median(compute)[:, None]
    ratios = np.log(compute / typical)
    usual = np.median(ratios, axis=0)
    noise = _deviation(ratios.T) * 1.25 / math.sqrt(len(times))  # of a median
    stands_out = usual >= np.maximum(3 * noise + math.log(1.05), 4 * _deviation(usual))
    sure = stands_out & (np.median(compute - typical, axis=0) >= _LEAST_SECONDS)
    for rank, (factor, is_sure) in enumerate(zip(np.exp(usual).tolist(), sure.tolist(), strict=True)):
        yield Slow("device", rank, factor, is_sure)


def _loaders(times: np.ndarray) -> Iterator[Slow]:
    waits = times[:, :, DATA] - _lower_median(times[:, :, DATA])[:, None]
    step = _step(times)
    for rank, lost in enumerate(_steady(np.maximum(waits, 0.0)).tolist()):
        yield Slow("loader", rank, 1 + lost / step, lost >= _LEAST_SECONDS)


def _store(times: np.ndarray) -> Slow:
    """Everyone's wait for rows: the lower median, so that the loader of a single rank doesn't count."""
    lost = float(_steady(_lower_median(times[:, :, DATA])))
    return Slow("store", None, 1 + lost / _step(times), lost >= _LEAST_SECONDS)


def _step(times: np.ndarray) -> float:
    """Seconds of a step without waiting for rows. It is shortest for the rank whose rows come last."""
    return max(float(_steady(times[:, :, WHOLE].min(axis=1))), 1e-9)


def _lower_median(values: np.ndarray) -> np.ndarray:
    """The lower median over the last axis: of two values, the lower one."""
    return np.sort(values, axis=-1)[..., (values.shape[-1] - 1) // 2]


def _deviation(values: np.ndarray) -> np.ndarray:
    """The standard deviation of normal values over the last axis, from their absolute deviations from the median:
    spikes don't count."""
    return 1.4826 * _lower_median(np.abs(values - _lower_median(values)[..., None]))


def _steady(values: np.ndarray) -> np.ndarray:
    """The mean over steps (the first axis) without the longest ones."""
    return np.sort(values, axis=0)[: len(values) - _SPIKES].mean(axis=0)
