"""Measures tokens per second and model FLOPs utilisation: `pretrain.trainer.throughput`."""

from collections.abc import Mapping

from pretrain.trainer.callback import Callback, Trainer
from pretrain.trainer.throughput import ThroughputMeter, peak_flops, peak_of_products


class Speed(Callback):
    """The metrics `train/tokens_per_second`, `train/mfu` and their like."""

    def before_training(self, trainer: Trainer) -> None:
        config, device, run = trainer.config, trainer.engine.device, trainer.run
        products = peak_of_products(config, device, trainer.outline, run.lengths, trainer.layout.micro_batch)
        trainer.peak = peak_flops(config, device) * run.ranks
        self._meter = ThroughputMeter(trainer.outline, trainer.peak, products and products * run.ranks)

    def before_steps(self, trainer: Trainer) -> None:
        self._meter.restart()

    def after_step(self, trainer: Trainer) -> None:
        self._meter.step(trainer.waited, trainer.micro_batches)

    def after_pause(self, trainer: Trainer) -> None:
        self._meter.restart()

    def metrics(self, trainer: Trainer) -> Mapping[str, float]:
        return self._meter.take()
