"""The callback `alerts:Alerts`, which sends alerts while a run trains."""

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from alerts.sender import AlertsSettings, Sender
from data_pipeline.base.config_file import check
from data_pipeline.base.formatting import human_size
from pretrain.run import rank_logs, restarts
from pretrain.training.callback import Callback

if TYPE_CHECKING:
    from pretrain.training.callback import StepResult
    from pretrain.training.trainer import Trainer

NAME = "alerts:Alerts"
_WINDOWS = 20  # the usual speed is the median of so many log lines
_FEWEST = 5  # log lines before one is compared with the usual speed
_IN_A_ROW = 2  # slow log lines that make an alert: one pause is none


class Alerts(Callback):
    """Sends an alert when the run trains again after a restart, when its loss spikes, when its speed falls, and when
    its disk fills; no further alert until the condition is over. Rank 0 alone sends."""

    def __init__(self, **settings: Any):
        """`settings`: the keys of `AlertsSettings`. Raises UserError for a key or a value that it doesn't allow."""
        self._settings = check(settings, AlertsSettings, NAME)
        self._sender: Sender | None = None  # on rank 0, once training begins
        self._speeds = deque[float](maxlen=_WINDOWS)
        self._slow = 0  # lines in a row
        self._disk_is_full = False

    def before_training(self, trainer: "Trainer") -> None:
        if trainer.run.world.rank != 0:
            return
        self._sender = Sender(self._settings, trainer.run.config.run.name)
        logs = rank_logs.supervised()
        if logs and restarts.EARLIER in os.environ:
            attempt = rank_logs.attempt(logs)
            text = f"attempt {attempt - 1} failed; attempt {attempt} continues from step {trainer.state.step}"
            self._sender.send("restarted", text)

    def after_step(self, trainer: "Trainer", result: "StepResult") -> None:
        if self._sender and trainer.state.health.spiking and not result.before.health.spiking:
            self._sender.send("spike", f"step {result.step}: the loss is {result.loss:.4f}, a spike")

    def after_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        if self._sender:
            self._check_speed(self._sender, trainer.step, metrics.get("train/tokens_per_second"))
            with contextlib.suppress(OSError):  # a network disk that doesn't answer is looked at again later
                self._check_disk(self._sender, trainer.step, shutil.disk_usage(trainer.run.directory).free)

    def _check_speed(self, sender: Sender, step: int, speed: float | None) -> None:
        """`speed` in tokens per second; None if it isn't measured."""
        if speed is None:
            return
        usual = median(self._speeds) if len(self._speeds) >= _FEWEST else 0.0
        self._slow = self._slow + 1 if speed < self._settings.slow_below * usual else 0
        if self._slow == _IN_A_ROW:
            sender.send("slow", f"step {step}: {speed:,.0f} tokens/s, usually {usual:,.0f}")
        if not self._slow:
            self._speeds.append(speed)

    def _check_disk(self, sender: Sender, step: int, free: int) -> None:
        """`free`: bytes that are left on the disk of the run's directory."""
        full = free < 1e9 * self._settings.disk_gigabytes
        if full and not self._disk_is_full:
            sender.send("disk", f"step {step}: {human_size(free)} left on the disk of the run's directory")
        self._disk_is_full = full

    def close(self, trainer: "Trainer") -> None:
        if self._sender:
            self._sender.finish()
