"""The callback that records the steps of a run of this repository: the run file names it as `kills.ours:Recording`."""

import hashlib
from pathlib import Path

from kills.record import Record

from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer


class Recording(Callback):
    """A row's id is a digest of the ids that the model gets, inputs and labels, corruption included."""

    priority = 60  # before the built-in callbacks, those that save included

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def before_training(self, trainer: Trainer) -> None:
        self._record = Record(self._folder)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        rows = []
        for batch in result.micro_batches:
            pairs = zip(batch["encoder_input_ids"].tolist(), batch["labels"].tolist(), strict=True)
            rows += [hashlib.blake2b(repr(pair).encode(), digest_size=8).hexdigest() for pair in pairs]
        self._record.step(result.step, rows, result.loss)

    def after_training(self, trainer: Trainer) -> None:
        self._record.weights(trainer.engine.module.state_dict())
