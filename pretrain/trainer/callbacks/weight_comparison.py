"""Compares the weights of all ranks before each save, and with those that were saved after each load."""

from pathlib import Path

from data_pipeline.foundation.errors import FailedError
from pretrain.checkpoint import index as checkpoint_index
from pretrain.faults.fingerprints import Fingerprints
from pretrain.run import outcome, watchdog
from pretrain.trainer.callback import Callback, Trainer


class WeightComparison(Callback):
    """`pretrain.faults.fingerprints`."""

    def after_load(self, trainer: Trainer, checkpoint: Path) -> None:
        saved = checkpoint_index.read(checkpoint).weights
        if saved is not None and Fingerprints(trainer.engine).of_masters() != saved:
            raise FailedError(f"{checkpoint}: its weights aren't those that the run had when it saved them")

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.saving:
            return
        with watchdog.slow_phase():
            fingerprints = Fingerprints(trainer.engine)
            self.compare(trainer, fingerprints)
            trainer.weights = fingerprints.of_masters()

    def compare(self, trainer: Trainer, fingerprints: Fingerprints) -> None:
        """Raises FailedError if a rank computes with weights that aren't the optimizer's: steps since then are wrong.

        The next attempt goes on from the last checkpoint on disk, before which they were right.
        """
        if difference := fingerprints.difference():
            if difference.rank is not None:
                outcome.faulty(difference.rank, trainer.run.rank)
            trainer.finish_saving()
            trainer.drop_unsaved()
            raise FailedError(f"step {trainer.step}: {difference.what}; its memory or its processor may be faulty")
