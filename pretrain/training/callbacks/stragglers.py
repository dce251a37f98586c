"""Reports stragglers: the rank that the others wait for, its machine and device, and whether its compute or its data
loading is slow.

Each rank times its own steps. Every few steps all ranks gather their times, right after a step, when they are
synchronized anyway. Rank 0 compares each rank with the lower median of all ranks in the same step; of two ranks, that
is the faster one. Whatever all ranks share, such as longer rows in a step, cancels out.
"""

import contextlib
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist

from pretrain.engine.ranks import communication_device
from pretrain.engine.step_measures import Slow, compared, named, waiting
from pretrain.evaluate import record
from pretrain.evaluate.hook import Findings
from pretrain.run.environment import place
from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer

TABLE = "stragglers"
_EVERY = 4  # steps between exchanges of times
WINDOW = 16  # steps that are judged together


class Straggling(Callback):
    """`faults.straggler_factor`: reports the straggler."""

    _named: Slow | None = None
    _metrics: Mapping[str, float] = {}  # of the last window, on rank 0

    def before_training(self, trainer: Trainer) -> None:
        self._machines, self._folder = trainer.report.machines, record.directory(trainer.run.directory)
        self._remote = trainer.config.data.remote  # a store, which may be slow too
        self._times = trainer.engine.measure_times()

    def before_steps(self, trainer: Trainer) -> None:
        """Forgets the times so far: after a start or a rewind, they don't predict the next steps."""
        self._own: list[tuple[float, float, float]] = []
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)

    def during_step(self, trainer: Trainer) -> AbstractContextManager[None]:
        return self._times.step()

    def after_step(self, trainer: Trainer) -> None:
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
        factor = trainer.config.faults.straggler_factor
        assert factor is not None
        found, before = compared(times, self._remote), self._named
        now = self._named = named(found, factor, before)
        self._metrics = {
            **{f"stragglers/{one.cause}": one.factor for one in sorted(found, key=lambda one: one.factor)},
            "stragglers/waiting": waiting(times),
            "stragglers/rank": -1.0 if now is None or now.rank is None else float(now.rank),
            "stragglers/factor": now.factor if now else 1.0,
        }
        if not _same(now, before):
            trainer.report.record_findings(trainer.step, self._findings(trainer.step, now, before))

    def _findings(self, step: int, now: Slow | None, before: Slow | None) -> Findings:
        line = f"warning: {self._what(now)}{self._remedy(now)}" if now else f"{self._which(before)} is no longer slow"
        host, device = place(now.rank, self._machines) if now and now.rank is not None else ("", "")
        row = {"rank": now and now.rank, "host": host, "device": device, "slow": now and now.cause}
        findings = Findings(self._metrics, {TABLE: [{**row, "what": self._what(now) if now else line}]}, lines=[line])
        with contextlib.suppress(OSError):  # a full disk must not end the run
            record.keep(self._folder, step, findings)
        return findings

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
