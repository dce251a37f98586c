"""Ends a run on request: a signal, the file RUN/stop, `--stop-at-step`, `run.max_hours`, or an object store that
doesn't answer."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType

from data_pipeline.base.processes import STOP_SIGNALS, announce, stop_signals
from pretrain.engine.ranks import first_value
from pretrain.run import status
from pretrain.run.restarts import earlier_seconds
from pretrain.training.callback import Callback, StepResult
from pretrain.training.trainer import Trainer

_STORE_LOST = "store_lost"
_received: list[int] = []


def catch_signals() -> None:
    """From now on, signals to stop are only recorded, so that they interrupt no step and no save.

    Signals that a supervisor blocked while this process started are delivered now. Only the main thread can catch
    signals; in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in stop_signals():
        signal.signal(number, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore_signals() -> None:
    """From now on, signals to stop do nothing, because the run is over. Python removes its own handlers as it exits."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def pass_on() -> None:
    """Sends the signals that have stopped the run to this process again, for the caller of the run. Not Ctrl-C's."""
    received = dict.fromkeys(_received)
    _received.clear()
    for number in received.keys() - {signal.SIGINT}:
        signal.raise_signal(number)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _received:
        announce(number, "saving and stopping after this step; Ctrl-\\ ends the run at once")
    _received.append(number)


class Stops(Callback):
    """Has all ranks stop after the same step, whichever rank is asked to stop. The run saves this step."""

    priority = -50

    def __init__(self, stop_at_step: int | None):
        self._stop_at_step = stop_at_step
        self._began = time.monotonic()

    def before_training(self, trainer: Trainer) -> None:
        hours = trainer.config.run.max_hours
        self._stop_file = trainer.run.directory / status.STOP
        self._deadline = self._began + hours * 3600 - earlier_seconds() if hours else float("inf")

    def votes(self, trainer: Trainer) -> Mapping[str, bool]:
        lost = trainer.store_error is not None
        by_file = trainer.run.world.rank == 0 and os.path.exists(self._stop_file)  # noqa: PTH110 - False if a disk fails
        late = time.monotonic() > self._deadline
        requested = bool(_received) or by_file or trainer.step == self._stop_at_step
        return {"stop": requested or late or lost, _STORE_LOST: lost}

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.votes[_STORE_LOST] and not result.last:
            error = first_value(str(trainer.store_error) if trainer.store_error else None)
            trainer.report.warn(f"{error}; stopping after step {result.step}, which is saved")
