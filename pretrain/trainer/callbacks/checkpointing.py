"""Saves the run to disk while it trains: `pretrain.checkpoint.save`."""

from collections.abc import Mapping

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint.save import Saved, Saver
from pretrain.run import watchdog
from pretrain.trainer.callback import Callback, Trainer

_FAILED = "end the save that failed"


class Checkpointing(Callback):
    """`checkpoint.every_steps`, and after the last step or on request."""

    def before_training(self, trainer: Trainer) -> None:
        self._saver = Saver(trainer.engine, trainer.run.origin)

    def requests(self, trainer: Trainer) -> Mapping[str, bool]:
        return {_FAILED: self._saver.failed}

    def after_step(self, trainer: Trainer) -> None:
        if trainer.outcome.applied:  # its loss was finite
            self._saver.prove()
        self._saved(trainer, self._saver.wait() if trainer.requested[_FAILED] else self._saver.done())
        if not trainer.saving:
            return
        with watchdog.slow_phase():
            self._saved(trainer, self._saver.start(trainer.state_to_save(), trainer.weights))
            if trainer.last or trainer.stopping:
                self._prove_last(trainer)
        trainer.paused()

    def finish_saving(self, trainer: Trainer) -> None:
        if trainer.outcome.applied:
            self._saver.prove()
        self._saved(trainer, self._saver.wait())

    def before_going_back(self, trainer: Trainer) -> None:
        self._saved(trainer, self._saver.wait())

    def after_training(self, trainer: Trainer) -> None:
        self._saved(trainer, self._saver.wait(), last=True)

    def _saved(self, trainer: Trainer, saved: Saved | None, last: bool = False) -> None:
        """Tells of a save that has ended. Raises FailedError if it failed and that ends the run."""
        if saved is None:
            return
        if saved.error is not None:
            if last or trainer.config.checkpoint.on_failure == "stop":
                raise FailedError(saved.error)
            trainer.report.warn(f"{saved.error}; training goes on (checkpoint.on_failure)")
        trainer.saved(saved)

    def _prove_last(self, trainer: Trainer) -> None:
        """Computes a loss from the state that was saved last, since no step follows. Raises FailedError at the end."""
        if trainer.engine.has_finite_loss(trainer.micro_batches[0]):
            self._saver.prove()
        elif trainer.last:
            raise FailedError(f"step {trainer.step}: the loss after the last step isn't finite")
