"""Replay: some steps are computed twice, to detect arithmetic that is silently wrong.

Before such a step, each rank computes the gradient of its first micro-batch, from the weights, rows and dropout of the
step itself. With several ranks, each rank also computes the gradient of the rank before it. During the step, hooks on
parameters read the same gradient once more, before it is accumulated and reduced. All three must be equal to the bit.

On GPUs without `compute.deterministic`, arithmetic doesn't repeat to the bit. There, norms and sums of gradients are
compared, relative to the norm. The tolerance is 10 × the spread: the largest difference of any tensor among the three
repetitions of the first replay, or in a later replay without a finding. The spread is at least a standard deviation of
the noisiest tensor, so ten of them don't occur by chance.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.base.errors import FailedError
from data_pipeline.loading.batches import Batch
from pretrain.engine.checkpoint.directory import set_aside_after
from pretrain.engine.ranks import of_all_ranks, on_rank_0
from pretrain.run import watchdog
from pretrain.training.callback import Callback
from pretrain.training.callbacks.silent_errors import repeated_gradients as gradients
from pretrain.training.callbacks.silent_errors.fingerprints import Finding
from pretrain.training.trainer import Trainer

_SHARE = 0.002  # of the forward and backward passes of training that replays may add
_OWN = 1.25  # passes that a replay takes on a single rank, with its fingerprints
_REPEATS = 3  # of the first replay, if arithmetic doesn't repeat to the bit
_SPREADS = 10.0
_LEAST_SPREAD = 1e-4  # later steps may use other kernels than the first


def interval(setting: int | Literal["auto"] | None, micro_batches: int, ranks: int, save_every: int) -> int | None:
    """Steps between replays, by the `setting` faults.replay_every_steps, with so many `micro_batches` per step and
    rank.

    "auto": as few steps as add at most 0.2 % to the passes of training. They divide the steps between saves, or are a
    multiple of them, so that a saved step has just been replayed.
    """
    if setting != "auto":
        return setting
    passes = _OWN if ranks == 1 else 2.0
    least = -(-round(passes / _SHARE) // micro_batches)
    if least > save_every:
        return -(-least // save_every) * save_every
    small = [steps for steps in range(1, math.isqrt(save_every) + 1) if save_every % steps == 0]
    return min(steps for one in small for steps in (one, save_every // one) if steps >= least)


class Replaying(Callback):
    """`faults.replay_every_steps`: replays the first step after a start, and then one step every so many steps.

    Attributes:
        found: the finding of the last replay.
        clean: the last step without a finding. After a finding, later checkpoints of this run may be wrong.
    """

    clean = _began = -1
    found: Finding | None = None

    def before_training(self, trainer: Trainer) -> None:
        config, engine = trainer.config, trainer.engine
        self._engine, self._machines, self._layout = engine, trainer.report.machines, trainer.layout
        asked, save_every = config.faults.replay_every_steps, config.checkpoint.every_steps
        self._every = interval(asked, self._layout.accumulation, trainer.run.ranks, save_every)
        self._model: nn.Module = engine.module
        self._names = [name for name, _ in self._model.named_parameters()]
        self._repeats = engine.device.type == "cpu" or config.compute.deterministic
        self._spread: float | None = 0.0 if self._repeats else None  # None: not measured yet
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        arithmetic = gradients.arithmetic(self._rank, self._machines)
        self._next = gradients.next_of(of_all_ranks(arithmetic, str)) if self._every else []

    def before_steps(self, trainer: Trainer) -> None:
        step = trainer.state.step
        self.clean = step if self._began < 0 else min(self.clean, step)
        self._began = step

    @contextlib.contextmanager
    def during_step(self, trainer: Trainer) -> Iterator[None]:
        step = trainer.before.step
        if self._every is None or ((step + 1) % self._every and step != self._began):
            yield
            return
        tables = self._replayed(step, trainer.before.position, trainer.micro_batches)
        with self._taken(first_pass=True) as real:
            yield
        self._compare(step, torch.stack([real, *tables]))

    def after_step(self, trainer: Trainer) -> None:
        """Raises FailedError if gradients are wrong: those of this step, and maybe all since the last clean replay.

        The next attempt resumes from the newest checkpoint on disk that isn't later than the last clean replay. Later
        checkpoints are set aside; with replays at each save there are none. The oldest checkpoint stays in any case:
        without it the run would begin anew.
        """
        if self.found is None:
            return
        self.found.tell(trainer)
        trainer.drop_unsaved()
        clean, run = self.clean, trainer.run.directory
        aside = on_rank_0(lambda: set_aside_after(run, clean), str)
        raise FailedError(f"step {trainer.step}: {self.found.what}; nothing was wrong at step {clean}{aside}")

    def _taken(self, first_pass: bool = False) -> contextlib.AbstractContextManager[Tensor]:
        return gradients.taken(self._model, self._engine.device, self._repeats, first_pass)

    def _replayed(self, step: int, position: int, batches: list[Batch]) -> list[Tensor]:
        """The fingerprints of the gradients of this rank's first micro-batch, and of the first micro-batch of the rank
        before. If arithmetic doesn't repeat to the bit, the first replay also measures the spread."""
        counted = self._engine.counted(batches)

        def computed(batch: Batch, rank: int) -> Tensor:
            watchdog.alive()
            first, *_ = replace(self._layout, rank=rank).firsts(position, len(batches))
            with self._taken() as table:
                self._engine.replay(step, first, batch, counted)
            return table

        again = computed(batches[0], self._rank)
        if self._spread is None:
            others = [computed(batches[0], self._rank) for _ in range(_REPEATS - 1)]
            self._spread = max(_LEAST_SPREAD, gradients.largest_difference([again, *others]))
        if all(rank == after for rank, after in enumerate(self._next)):
            return [again, again]
        return [again, computed(*gradients.passed_on(batches[0], self._next, self._engine.device))]

    def _compare(self, step: int, own: Tensor) -> None:
        """Compares the tables (3, parameters, 2) of all ranks: of the step, of its replay, of the rank before."""
        gathered = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(gathered, own)
        real, again, of_before = torch.stack(gathered, dim=1).cpu()
        by_next = of_before[self._next]
        repeated, shared = self._differ(real, again), self._differ(again, by_next)
        self.found = gradients.judged(repeated, shared, self._next, self._names, self._machines)
        if self.found is None:
            self.clean = step + 1
            if self._spread:
                spreads = (float(gradients.difference(real, one).max()) for one in (again, by_next))
                self._spread = max(self._spread, *spreads)

    def _differ(self, one: Tensor, other: Tensor) -> Tensor:
        """(ranks, parameters) True if two fingerprints (ranks, parameters, 2) are of different gradients."""
        if self._repeats:
            return (one != other).any(dim=-1)
        assert self._spread is not None
        return gradients.difference(one, other) > _SPREADS * self._spread
