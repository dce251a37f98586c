"""Stragglers: names a rank that the others wait for, its machine and device, and what of it is slow.

Each rank times its steps by itself. Every few steps all ranks gather their times, right after a step, when they are
together anyway; rank 0 judges.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pretrain.evaluation import record
from pretrain.evaluation.hook import Findings
from pretrain.faults.slow_ranks import WINDOW, Slow, compared, named, waiting
from pretrain.run.environment import Machine, place
from pretrain.zero.ranks import communication_device
from pretrain.zero.step_times import StepTimes

TABLE = "stragglers"
_EVERY = 4  # steps from one exchange to the next


class Stragglers:
    """Watches the ranks of a run on `machines`; `factor` None: doesn't.

    `folder`: of the run's tables. `remote`: true if rows come from a remote store, which may be slow too. `busy`:
    whether rank 0 now does more than train; its steps then don't count.
    """

    def __init__(
        self,
        factor: float | None,
        machines: Sequence[Machine],
        folder: Path,
        remote: bool,
        busy: Callable[[], bool] = lambda: False,
    ):
        self._machines, self._folder, self._remote, self._busy = machines, folder, remote, busy
        self._factor = factor if remote or dist.get_world_size() > 1 else None
        self._named: Slow | None = None
        self.metrics: dict[str, float] = {}
        """Of the last window, on rank 0."""
        self.restart()

    def restart(self) -> None:
        """Forgets the steps so far: a start, and what comes after a rewind, doesn't tell of the next ones."""
        self._own: list[tuple[float, float, float]] = []
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)

    def step(self, step: int, times: StepTimes) -> Iterator[Findings]:
        """Takes this rank's times of a step. All ranks call it; on rank 0 it yields what has become slow or fast."""
        if self._factor is None:
            return
        self._own.append((times.data, times.compute, times.whole))
        if len(self._own) < _EVERY:
            return
        own = torch.tensor(self._own, dtype=torch.float64, device=communication_device())
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        self._own = []
        if self._busy():
            self._window.clear()
        elif dist.get_rank() == 0:
            self._window.extend(torch.stack(gathered, dim=1).cpu().numpy())
            if len(self._window) == WINDOW:
                yield from self._judge(step, np.stack(self._window), self._factor)

    def _judge(self, step: int, times: np.ndarray, factor: float) -> Iterator[Findings]:
        found, before = compared(times, self._remote), self._named
        now = self._named = named(found, factor, before)
        self.metrics = {
            **{f"stragglers/{one.cause}": one.factor for one in sorted(found, key=lambda one: one.factor)},
            "stragglers/waiting": waiting(times),
            "stragglers/rank": -1.0 if now is None or now.rank is None else float(now.rank),
            "stragglers/factor": now.factor if now else 1.0,
        }
        if _same(now, before):
            return
        yield self._findings(step, now, before)

    def _findings(self, step: int, now: Slow | None, before: Slow | None) -> Findings:
        line = f"warning: {self._what(now)}{self._remedy(now)}" if now else f"{self._which(before)} is no longer slow"
        host, device = place(now.rank, self._machines) if now and now.rank is not None else ("", "")
        row = {"rank": now and now.rank, "host": host, "device": device, "slow": now and now.cause}
        findings = Findings(self.metrics, {TABLE: [{**row, "what": self._what(now) if now else line}]}, lines=[line])
        with contextlib.suppress(OSError):  # a full disk must not end the run
            record.keep(self._folder, step, findings)
        return findings

    def _what(self, slow: Slow) -> str:
        if slow.cause == "device":
            return (
                f"{self._which(slow)} is slow: it computes {slow.factor:.2f} × as long as the others, which wait for it"
            )
        longer = f"and a step takes {slow.factor:.2f} × as long"
        if slow.cause == "loader":
            return f"{self._which(slow)} is slow: the others wait for it to get its rows, {longer}"
        return f"{self._which(slow)} is slow: all ranks wait for rows, {longer}"

    def _remedy(self, slow: Slow) -> str:
        """Of which steps that is, and what to do."""
        since = f", in the last {WINDOW} steps"
        if slow.cause != "device":
            return since
        if len(self._machines) == 1 and not self._machines[0]["gpus"]:
            return f"{since}; if other programs take its core, end them or train on fewer ranks"
        return f"{since}; launch doctor checks its node"

    def _which(self, slow: Slow | None) -> str:
        if slow is None or slow.rank is None:
            return "the store"
        host, device = place(slow.rank, self._machines)
        owner = "the loader of " if slow.cause == "loader" else ""
        return f"{owner}rank {slow.rank} ({host}, {device})"


def _same(one: Slow | None, other: Slow | None) -> bool:
    return (one and (one.cause, one.rank)) == (other and (other.cause, other.rank))
