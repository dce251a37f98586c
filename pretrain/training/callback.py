"""Callbacks do everything in training besides the steps themselves. `Metrics` collects what they record for a log line.

A run file can add callbacks; each is a class of any package: docs/how-to/write-a-callback.md.
"""

import contextlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from data_pipeline.loading.batches import Batch
from pretrain.engine.checkpoint.save import Saved
from pretrain.engine.ranks import all_gather
from pretrain.run.train_state import TrainState

if TYPE_CHECKING:
    from pretrain.training.trainer import Trainer

Reduce = Literal["mean", "sum", "max"]
_METRICS = {"labels": "loss"}  # others by the names of their losses


@dataclass(frozen=True)
class StepResult:
    """A step that has been taken. `micro_batches` and `waited` are of this rank, and all else is the same on all ranks.

    Attributes:
        step: the number of the step, from 1.
        loss: the mean over the valid targets of the global batch, in nats.
        applied: False if the gradient was not finite and the update was skipped; the loss may be NaN then.
        losses: by the name of each loss, its sum over the global batch, and the number of labels that its mean is over.
        votes: for the name of each vote, True if any rank voted True: see `Callback.votes`.
        micro_batches: the micro-batches of this rank, on its device.
        waited: seconds for which this rank waited for them.
        before: the progress before the step. `trainer.state` is the progress after the step.
        last: True if the step is the last one of the run.
        stopping: True if the run saves and stops after this step.
    """

    step: int
    loss: float
    applied: bool
    losses: Mapping[str, tuple[float, int]]
    votes: Mapping[str, bool]
    micro_batches: list[Batch]
    waited: float
    before: TrainState
    last: bool
    stopping: bool

    def due(self, every_steps: int) -> bool:
        """True after each `every_steps` steps, after the last step, and if the run stops."""
        return self.step % every_steps == 0 or self.last or self.stopping


class Callback:
    """One concern of training. A callback overrides the methods that it needs.

    All ranks call each method together, except `close`. An error in a callback ends the run on all ranks. An evaluation
    whose errors must not end the run is a hook (`pretrain.evaluate.hook`).

    The order of the calls, each of all callbacks by `priority` before the next call:

    - A start: `before_training`, then `after_load` (if a checkpoint was loaded) and `load_state_dict`, then
      `before_steps`. So what `before_training` sets doesn't replace what was restored.
    - Each step: `votes`, `before_step` and `during_step`, then `before_update`, then `after_step`.
    - A rewind, after `after_step` of all callbacks: `after_load` and `load_state_dict`, then `before_steps`.
    - The end: `after_training`, unless the run fails; then `close`, in any case.
    """

    priority: ClassVar[int] = 0
    """A callback with a higher priority is called first. Callbacks of one priority are called in the order of the run
    file. `pretrain.training.callbacks` lists the priorities of the built-in callbacks: those that may rewind the run or
    measure steps are above 0, those that log, evaluate or save are below."""

    def before_training(self, trainer: "Trainer") -> None:
        """Called once, after the weights are loaded. The state of the callback is restored later, by
        `load_state_dict`."""

    def before_steps(self, trainer: "Trainer") -> None:
        """Called before the first step, and before the first step after a rewind."""

    def votes(self, trainer: "Trainer") -> Mapping[str, bool]:
        """Called before each step. Returns this rank's votes by name, with the same names on all ranks.

        The votes travel with the sums of the step. After the step, `result.votes[name]` is True if any rank has voted
        True. The vote "stop" has the run save and stop after this step.
        """
        return {}

    def before_step(self, trainer: "Trainer", micro_batches: list[Batch]) -> None:
        """Called before step `trainer.step`, with this rank's micro-batches."""

    def during_step(self, trainer: "Trainer", micro_batches: list[Batch]) -> AbstractContextManager[None]:
        """Returns a context within which the step is taken. The context must not change the step."""
        return contextlib.nullcontext()

    def before_update(self, trainer: "Trainer") -> None:
        """Called in each step once all gradients are computed and reduced, and before the optimizer's update."""

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Called after each step. `trainer.rewinding`: an earlier callback has found the step wrong, and the run goes
        back to a checkpoint as soon as all callbacks have seen the step."""

    def after_pause(self, trainer: "Trainer") -> None:
        """Called after an evaluation or a save, whose time must not count as the time of steps."""

    def after_load(self, trainer: "Trainer", checkpoint: Path) -> None:
        """Called after the weights and the optimizer state of a checkpoint are loaded; at a start, after
        `before_training`."""

    def before_save(self, trainer: "Trainer") -> None:
        """Called after the step whose state is saved next."""

    def after_save(self, trainer: "Trainer", saved: Saved) -> None:
        """Called after a checkpoint has been written, or could not be written (`saved.error`)."""

    def before_rewind(self, trainer: "Trainer") -> None:
        """Called before a rewind, or before the run ends because its last steps were wrong. Drop all state that isn't
        on disk."""

    def finish_saving(self, trainer: "Trainer") -> None:
        """Called when the checkpoints that are being written must be on disk before training continues."""

    def after_training(self, trainer: "Trainer") -> None:
        """Called once, when the run has finished or stops; not after an error."""

    def close(self, trainer: "Trainer") -> None:
        """Called once, at the end of the run, also if the run fails. Close files and connections here.

        The other ranks may have ended, so this may not communicate with them. An error here is a warning. There is no
        call if `before_training` hasn't been called or has failed, or if the process is killed, as a supervisor kills
        the other ranks of a rank that has failed.
        """

    def metrics(self, trainer: "Trainer") -> Mapping[str, float]:
        """Returns metrics by name for a log line, which has the metrics of rank 0 only. `trainer.metrics.record`, which
        may be called here too, reduces values over the ranks and the steps since the last log line."""
        return {}

    def after_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a log line or of an evaluation. On ranks other than 0, those of `metrics` are of
        this rank only."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint: values of JSON, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned. Called after `before_training` and after each rewind, with {}
        for a new run or if the checkpoint has none."""


class _Recorded(NamedTuple):
    """`total`: the sum of the `number` values of a metric, or the greatest value. A tensor stays on its device."""

    reduce: Reduce
    total: Tensor
    number: int

    def merged(self, name: str, other: "_Recorded") -> "_Recorded":
        if self.reduce != other.reduce:
            raise ValueError(f"the metric {name!r} is recorded with reduce={self.reduce!r} and {other.reduce!r}")
        total = torch.maximum(self.total, other.total) if self.reduce == "max" else self.total + other.total
        return _Recorded(self.reduce, total, self.number + other.number)


class Metrics:
    """The losses of the steps since the last log line, and the values that callbacks have recorded since then.

    Each rank has one. `record` may be called on any rank; all ranks call the other methods together.
    """

    def __init__(self) -> None:
        self._losses: dict[str, tuple[float, int]] = {}  # by name, its sum and the number of labels; of all ranks
        self._recorded: dict[str, _Recorded] = {}  # of this rank

    def record(self, name: str, value: float | Tensor, reduce: Reduce = "mean") -> None:
        """Records a value for the next log line, which has the mean, the sum or the maximum of all values of this name:
        of all steps since the last log line, and of all ranks.

        Some ranks may record more values than others, or none. A tensor, a scalar on any device, isn't waited for.
        Values that were recorded after the last log line aren't in checkpoints. Raises ValueError if `reduce` isn't
        what it was for the name before.
        """
        if reduce not in get_args(Reduce):
            raise ValueError(f"the metric {name!r}: reduce is one of {', '.join(get_args(Reduce))}, not {reduce!r}")
        new = _Recorded(reduce, torch.as_tensor(value, dtype=torch.float64).detach(), 1)
        before = self._recorded.get(name)
        self._recorded[name] = before.merged(name, new) if before else new

    def add_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """Adds the losses of a step: by name, the sum over the global batch and the number of labels."""
        for name, (added, labels) in losses.items():
            total, number = self._losses.get(name, (0.0, 0))
            self._losses[name] = total + added, number + labels

    @property
    def unlogged(self) -> dict[str, tuple[float, int]]:
        """The losses since the last log line, for a checkpoint."""
        return dict(self._losses)

    def restore(self, state: TrainState) -> None:
        """Continues from the losses in a checkpoint, without values that were recorded since."""
        self._losses, self._recorded = dict(state.unlogged), {}

    def take(self) -> dict[str, float]:
        """The metrics since the last call, the same on all ranks. Raises ValueError on all ranks if two of them have
        recorded a name with another `reduce`.

        train/loss: the mean per target token, in nats, over the steps that weren't skipped; NaN if all were.
        train/NAME: other losses by their names, a family's "embedding_loss" as the gradient includes it. All others by
        the names that they were recorded with.
        """
        losses, self._losses = self._losses or {"labels": (0.0, 0)}, {}
        recorded, self._recorded = self._recorded, {}
        found = {
            f"train/{_METRICS.get(name, name)}": total / number if number else math.nan
            for name, (total, number) in sorted(losses.items())
        }
        for name, one in sorted(_of_all_ranks(recorded).items()):
            found[name] = float(one.total) / one.number if one.reduce == "mean" else float(one.total)
        return found


def _of_all_ranks(recorded: Mapping[str, _Recorded]) -> dict[str, _Recorded]:
    """The values of all ranks, joined in the order of the ranks. All ranks call this together, each with its own names.

    The values are gathered, not reduced, since the ranks may have recorded other names.
    """
    own = {name: (one.reduce, float(one.total), one.number) for name, one in recorded.items()}
    joined: dict[str, _Recorded] = {}
    for of_rank in all_gather(own, dict[str, tuple[Reduce, float, int]]):
        for name, (reduce, total, number) in of_rank.items():
            one = _Recorded(reduce, torch.tensor(total, dtype=torch.float64), number)
            joined[name] = joined[name].merged(name, one) if name in joined else one
    return joined
