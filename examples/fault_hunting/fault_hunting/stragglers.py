"""Reports stragglers: the rank that the others wait for, its machine and device, and whether its compute or its data
loading is slow.

Each rank times its own steps. Every few steps all ranks gather their times, right after a step, when they are
synchronized anyway. Rank 0 compares each rank with the lower median of all ranks in the same step; of two ranks, that
is the faster one. Causes that all ranks share, such as longer rows in a step, cancel out.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline.loading.batches import Batch
from fault_hunting.clocks import DeviceTimes, HostTimes
from fault_hunting.findings import place
from pretrain.engine.ranks import communication_device
from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

TABLE = "stragglers"
DATA, COMPUTE, WHOLE = range(3)  # of a rank's times
_EVERY = 4  # steps between exchanges of times
WINDOW = 16  # steps that are judged together
_SPIKES = 2  # the longest waits for rows of a window, which don't count: a new block, a cache that fills
_LEAST_SECONDS = 5e-4  # a step: less is nothing to name
_NAMED, _OVER = 0.7, 0.35  # of the logarithm of the factor to find, since a window is noisy


@dataclass(frozen=True)
class Slow:
    """The slow part of a run: the device or the data loader of `rank`, or the object store, which all ranks wait for
    (`rank` None).

    Attributes:
        factor: for a device, its compute time divided by the other ranks' compute time; for a loader or the store, the
            step time divided by the step time without waiting for data.
        sure: True if `factor` stands out from the noise of the steps.
    """

    cause: Literal["device", "loader", "store"]
    rank: int | None
    factor: float
    sure: bool


class Stragglers(Callback):
    """Reports a rank that computes `factor` times as long as the others, or that lengthens steps as much by waiting for
    data, within 20 steps. Off on a single rank without remote corpora."""

    _named: Slow | None = None
    _metrics: Mapping[str, float] = {}  # of the last window, on rank 0

    def __init__(self, factor: float = 1.3):
        if type(factor) not in (int, float) or not 1 < factor < math.inf:
            raise ValueError(f"factor: expected a number > 1, got {factor!r}")
        self._factor = factor

    def before_training(self, trainer: Trainer) -> None:
        self._machines, self._folder = trainer.report.machines, record.directory(trainer.run.directory)
        self._remote = trainer.config.data.remote  # a store, which may be slow too
        self._on = trainer.run.world.size > 1 or self._remote
        self._times = DeviceTimes() if trainer.engine.device.type == "cuda" else HostTimes()
        if self._on:
            trainer.engine.time_steps(self._times)

    def before_steps(self, trainer: Trainer) -> None:
        """Forgets the times so far: after a start or a rewind, they don't predict the next steps."""
        self._own: list[tuple[float, float, float]] = []
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._times.ask_for_rows()

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        self._times.take_rows()

    def during_step(self, trainer: Trainer, micro_batches: list[Batch]) -> AbstractContextManager[None]:
        return self._times.step()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._times.waited_for_rows(result.waited)
        if self._on:
            self._exchange(trainer)
        self._times.ask_for_rows()

    def _exchange(self, trainer: Trainer) -> None:
        """Keeps the times of this step. Every few steps, gathers those of all ranks."""
        self._own.append((self._times.data, self._times.compute, self._times.whole))
        if len(self._own) < _EVERY:
            return
        own = torch.tensor(self._own, dtype=torch.float64, device=communication_device())
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        self._own = []
        if trainer.report.connects_to_mlflow():  # rank 0 now does more than train
            self._window.clear()
        elif dist.get_rank() == 0:
            self._window.extend(torch.stack(gathered, dim=1).cpu().numpy())
            if len(self._window) == WINDOW:
                self._judge(trainer, np.stack(self._window))

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return self._metrics

    def _judge(self, trainer: Trainer, times: np.ndarray) -> None:
        """Reports a straggler, and the end of a straggler."""
        found, before = compared(times, self._remote), self._named
        now = self._named = named(found, self._factor, before)
        self._metrics = {
            **{f"stragglers/{one.cause}": one.factor for one in sorted(found, key=lambda one: one.factor)},
            "stragglers/waiting": waiting(times),
            "stragglers/rank": -1.0 if now is None or now.rank is None else float(now.rank),
            "stragglers/factor": now.factor if now else 1.0,
        }
        if not _same(now, before):
            trainer.report.record_result(trainer.step, self._result(trainer.step, now, before))

    def _result(self, step: int, now: Slow | None, before: Slow | None) -> EvalResult:
        line = f"warning: {self._what(now)}{self._remedy(now)}" if now else f"{self._which(before)} is no longer slow"
        host, device = place(now.rank, self._machines) if now and now.rank is not None else ("", "")
        row = {"rank": now and now.rank, "host": host, "device": device, "slow": now and now.cause}
        result = EvalResult(self._metrics, {TABLE: [{**row, "what": self._what(now) if now else line}]}, lines=[line])
        with contextlib.suppress(OSError):  # a full disk must not end the run
            record.keep(self._folder, step, result)
        return result

    def _what(self, slow: Slow) -> str:
        if slow.cause == "device":
            computes = f"it computes {slow.factor:.2f} × as long as the others, which wait for it"
            return f"{self._which(slow)} is a straggler: {computes}"
        longer = f"and a step takes {slow.factor:.2f} × as long"
        if slow.cause == "loader":
            return f"{self._which(slow)} is a straggler: the others wait until it has its rows, {longer}"
        return f"{self._which(slow)} is slow: all ranks wait for rows, {longer}"

    def _remedy(self, slow: Slow) -> str:
        """The steps that were judged, and what to do."""
        on_one_cpu = len(self._machines) == 1 and not self._machines[0]["gpus"]
        advice = "launch doctor checks its node"
        if on_one_cpu:
            advice = "if other programs take its core, end them or train on fewer ranks"
        return f", in the last {WINDOW} steps{f'; {advice}' if slow.cause == 'device' else ''}"

    def _which(self, slow: Slow | None) -> str:
        if slow is None or slow.rank is None:
            return "the store"
        host, device = place(slow.rank, self._machines)
        owner = "the loader of " if slow.cause == "loader" else ""
        return f"{owner}rank {slow.rank} ({host}, {device})"


def _same(one: Slow | None, other: Slow | None) -> bool:
    return (one and (one.cause, one.rank)) == (other and (other.cause, other.rank))


# Which rank is slow: pure functions of the times of all ranks.


def compared(times: np.ndarray, remote: bool) -> list[Slow]:
    """Each rank in each respect, by `times` (steps, ranks, 3) in seconds: `DATA`, `COMPUTE` and `WHOLE`.

    `remote`: true if rows come from a remote store. One rank alone has nothing to be compared with.
    """
    store = [_store(times)] if remote else []
    return store if times.shape[1] == 1 else [*_devices(times), *_loaders(times), *store]


def named(found: list[Slow], factor: float, before: Slow | None) -> Slow | None:
    """Picks the straggler to report, slower than others by `factor`; None: there is none. Hysteresis: the straggler
    named `before` stays until it recovers, or until another part is slower by as much again."""
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
