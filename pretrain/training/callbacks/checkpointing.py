"""Saves checkpoints while a run trains."""

from collections.abc import Mapping
from pathlib import Path

from data_pipeline.base.errors import FailedError
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.engine_state import fingerprint_of_masters
from pretrain.engine.checkpoint.save import Saved, Saver
from pretrain.run import watchdog
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_WRITING = "checkpoint_is_being_written"  # a vote


class Checkpointing(Callback):
    """`checkpoint.every_steps`: saves the run; also after the last step and on request."""

    priority = -40
    _saving = False  # on all ranks: a save has begun, and its outcome isn't known yet

    def before_training(self, trainer: Trainer) -> None:
        self._saver = Saver.open(trainer.engine, trainer.run.origin)

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and fingerprint_of_masters(trainer.engine) != saved:
            raise FailedError(f"{checkpoint}: its weights differ from those that the run saved")

    def votes(self, trainer: Trainer) -> Mapping[str, bool]:
        return {_WRITING: self._saving and self._saver.writes}

    def before_update(self, trainer: Trainer) -> None:
        if self._saving:
            self._saver.wait_for_staging()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.rewinding:
            return
        if self._saving:
            if result.applied:  # its loss was finite
                self._saver.prove()
            if not result.votes[_WRITING]:
                self._wait(trainer)
        if not result.due(trainer.config.checkpoint.every_steps):
            return
        for callback in trainer.callbacks.values():
            callback.before_save(trainer)
        with watchdog.slow_phase():
            self._saved(trainer, self._saver.start(trainer.state_to_save(), fingerprint_of_masters(trainer.engine)))
            self._saving = True
            if result.last or result.stopping:
                self._prove_last(trainer, result)
        trainer.resume_clocks()

    def finish_saving(self, trainer: Trainer) -> None:
        if trainer.engine.applied:  # the loss of the last step was finite
            self._saver.prove()
        self._wait(trainer)

    def before_rewind(self, trainer: Trainer) -> None:
        self._wait(trainer)

    def after_training(self, trainer: Trainer) -> None:
        self._wait(trainer, last=True)

    def _wait(self, trainer: Trainer, last: bool = False) -> None:
        self._saving = False
        self._saved(trainer, self._saver.wait(), last)

    def _saved(self, trainer: Trainer, saved: Saved | None, last: bool = False) -> None:
        """Reports a save that has ended. Raises FailedError if the save failed and the failure ends the run."""
        if saved is None:
            return
        if saved.error is not None:
            if last or trainer.config.checkpoint.on_failure == "stop":
                raise FailedError(saved.error)
            trainer.report.warn(f"{saved.error}; training continues (checkpoint.on_failure)")
        for callback in trainer.callbacks.values():
            callback.after_save(trainer, saved)

    def _prove_last(self, trainer: Trainer, result: StepResult) -> None:
        """Proves the last save by a loss, since no step follows. Raises FailedError if the loss isn't finite at the end
        of the run."""
        if trainer.engine.has_finite_loss(result.micro_batches[0]):
            self._saver.prove()
        elif result.last:
            raise FailedError(f"step {result.step}: the loss after the last step isn't finite")
