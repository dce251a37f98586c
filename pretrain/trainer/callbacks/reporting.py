"""Prints and records what all callbacks measure, every `tracking.log_every_steps`."""

import time
from collections.abc import Mapping

from pretrain.checkpoint.save import Saved
from pretrain.hardware.cpu_speed import seconds_left
from pretrain.trainer.callback import Callback, Trainer
from pretrain.zero.memory import peak_memory

_TYPICAL_STEP = 3  # after a start, the first that takes as long as later ones


class Reporting(Callback):
    """The lines on the terminal, RUN/metrics.jsonl, and with it MLflow."""

    def before_training(self, trainer: Trainer) -> None:
        config, run, report = trainer.config, trainer.run, trainer.report
        report.announce(trainer.outline.num_parameters(), trainer.layout)
        if trainer.engine.device.type == "cpu" and trainer.peak:
            report.forecast_on_cpu(seconds_left(config, run.model, run.lengths, trainer.state.step, trainer.peak))

    def before_steps(self, trainer: Trainer) -> None:
        self._first, self._began = trainer.state.step, time.monotonic()

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self._first + _TYPICAL_STEP:
            trainer.report.forecast(trainer.step, time.monotonic() - self._began)
        self._began = time.monotonic()
        if trainer.logging:
            self.log(trainer)

    def log(self, trainer: Trainer) -> None:
        metrics = {**trainer.engine.take_metrics(), **trainer.metrics()}
        trainer.report.log(trainer.step, metrics)
        for callback in trainer.callbacks.values():
            callback.after_log(trainer, metrics)

    def after_save(self, trainer: Trainer, saved: Saved) -> None:
        if saved.error is None:
            trainer.report.saved(saved)

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        position = trainer.state.position
        return {
            "train/rows": position,
            "train/tokens": trainer.run.tokens(position),
            "train/peak_memory_gigabytes": peak_memory(trainer.engine.device) / 1e9,
        }
