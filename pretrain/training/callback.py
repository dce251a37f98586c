"""Callbacks do everything in training besides the steps themselves.

A run file can add callbacks; each is a class of any package: docs/how-to/write-a-callback.md.
"""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.engine.checkpoint.save import Saved

if TYPE_CHECKING:
    from pretrain.training.trainer import Trainer


class Callback:
    """One concern of training. A callback overrides the methods that it needs.

    The trainer calls each method on all ranks, callback after callback in the order of
    `pretrain.training.callbacks.build_callbacks`. An error in a callback ends the run on all ranks. An evaluation whose
    errors must not end the run is a hook (`pretrain.evaluate.hook`).

    A start calls `before_training` of all callbacks, then `after_load` (if a checkpoint was loaded) and
    `load_state_dict` of each, then `before_steps`. A rewind repeats all but the first.
    """

    def before_training(self, trainer: "Trainer") -> None:
        """Called once, after the weights are loaded, and before `load_state_dict`."""

    def before_steps(self, trainer: "Trainer") -> None:
        """Called before the first step, and before the first step after a rewind."""

    def votes(self, trainer: "Trainer") -> Mapping[str, bool]:
        """Called before each step. Returns this rank's votes by name, with the same names on all ranks.

        The votes travel with the sums of the step. After the step, `trainer.any_rank(name)` is True if any rank has
        voted True. The vote "stop" has the run save and stop after this step.
        """
        return {}

    def before_step(self, trainer: "Trainer") -> None:
        """Called before step `trainer.step`, on `trainer.micro_batches`."""

    def during_step(self, trainer: "Trainer") -> AbstractContextManager[None]:
        """Returns a context within which the step is taken. The context must not change the step."""
        return contextlib.nullcontext()

    def before_update(self, trainer: "Trainer") -> None:
        """Called in each step once all gradients are computed and reduced, and before the optimizer's update."""

    def after_step(self, trainer: "Trainer") -> None:
        """Called after each step, with its `trainer.outcome`. `trainer.rewinding`: an earlier callback has found the
        step wrong, and the run goes back to a checkpoint as soon as all callbacks have seen the step."""

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

    def metrics(self, trainer: "Trainer") -> Mapping[str, float]:
        """Returns metrics by name for a log line, which has those of rank 0 only. `trainer.metrics.record`, which may
        be called here too, reduces values over the ranks and the steps since the last log line."""
        return {}

    def after_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Called with the metrics of a log line or of an evaluation. On ranks other than 0, those of `metrics` are of
        this rank only."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this callback for a checkpoint: values of JSON, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned. Called after `before_training` and after each rewind, with {}
        if the checkpoint has none."""
