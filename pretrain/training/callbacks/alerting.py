"""Sends alerts while a run trains: `tracking.alerts`."""

import contextlib
import shutil
from collections import deque
from collections.abc import Mapping
from statistics import median

from data_pipeline.base.formatting import human_size
from pretrain.config.run_config import AlertsSection
from pretrain.run.alerts import Alerts
from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer

_WINDOWS = 20  # the usual speed is the median of so many log lines
_FEWEST = 5  # log lines before one is compared with the usual speed
_IN_A_ROW = 2  # slow log lines that make an alert: one pause is none


class Alerting(Callback):
    """Sends an alert when the loss spikes, when the speed falls, and when the disk fills; no further alert until the
    condition is over."""

    def __init__(self, settings: AlertsSection, name: str):
        self._settings, self._alerts = settings, Alerts(settings, name)
        self._speeds = deque[float](maxlen=_WINDOWS)
        self._slow = 0  # lines in a row
        self._disk_is_full = False

    def after_step(self, trainer: Trainer) -> None:
        if trainer.run.rank == 0 and trainer.state.health.spiking and not trainer.before.health.spiking:
            self._alerts.send("spike", f"step {trainer.step}: the loss is {trainer.outcome.loss:.4f}, a spike")

    def after_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.run.rank == 0:
            self.check_speed(trainer.step, metrics.get("train/tokens_per_second"))
            with contextlib.suppress(OSError):  # a network disk that doesn't answer is looked at again later
                self.check_disk(trainer.step, shutil.disk_usage(trainer.run.directory).free)

    def check_speed(self, step: int, speed: float | None) -> None:
        """`speed` in tokens per second; None if it isn't measured."""
        if speed is None:
            return
        usual = median(self._speeds) if len(self._speeds) >= _FEWEST else 0.0
        self._slow = self._slow + 1 if speed < self._settings.slow_below * usual else 0
        if self._slow == _IN_A_ROW:
            self._alerts.send("slow", f"step {step}: {speed:,.0f} tokens/s, usually {usual:,.0f}")
        if not self._slow:
            self._speeds.append(speed)

    def check_disk(self, step: int, free: int) -> None:
        """`free`: bytes that are left on the disk of the run's directory."""
        full = free < 1e9 * self._settings.disk_gigabytes
        if full and not self._disk_is_full:
            self._alerts.send("disk", f"step {step}: {human_size(free)} left on the disk of the run's directory")
        self._disk_is_full = full

    def after_training(self, trainer: Trainer) -> None:
        self._alerts.finish()
