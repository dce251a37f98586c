"""A network disk that doesn't answer, or a full one, ends nothing that only watches a run."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pretrain.config.run_config import AlertsSection
from pretrain.run import status
from pretrain.run.system_metrics import SystemMonitor, files_of_machines
from pretrain.training import run_report
from pretrain.training.callbacks.alerting import Alerting
from pretrain.training.callbacks.profiling import Profiling
from pretrain.training.callbacks.stops import Stops


class Stale:
    """A function that raises ESTALE until `answers`, and then calls `function`."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self.answers, self.calls = function, False, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        if not self.answers:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._function(*given, **named)


@pytest.fixture
def stale(monkeypatch) -> Callable[[Any, str], Stale]:
    def make(owner: Any, name: str) -> Stale:
        function = Stale(getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *given, **named: function(*given, **named))
        return function

    return make


def test_the_monitor_of_a_machine_samples_again_once_the_disk_answers(tmp_path, stale):
    usage = stale(psutil, "disk_usage")
    monitor = SystemMonitor(tmp_path, 1, "node", True, seconds=0.01)
    while usage.calls < 3:
        time.sleep(0.01)
    usage.answers = True
    while not any(file.read_text() for file in files_of_machines(tmp_path)):
        time.sleep(0.01)
    monitor.close()
    (file,) = files_of_machines(tmp_path)
    assert json.loads(file.read_text().splitlines()[0])["step"] >= 2  # the samples that failed count


def test_a_run_without_a_file_for_system_metrics_trains(tmp_path, capsys):
    (tmp_path / "system").write_text("no folder")
    run = SimpleNamespace(
        rank=0, directory=tmp_path, config=SimpleNamespace(tracking=SimpleNamespace(system_metrics_seconds=1.0))
    )
    assert run_report._system_monitor(run, [{"host": "node", "ranks": [0], "gpus": []}], 1) is None
    assert capsys.readouterr().err == f"warning: node has no system metrics: {tmp_path}: File exists\n"


def test_alerts_look_at_the_disk_again_later(tmp_path, stale):
    usage = stale(shutil, "disk_usage")
    alerting = Alerting(AlertsSection(command=f"echo $ALERT_EVENT >> {tmp_path}/told", disk_gigabytes=1e9), "mine")
    trainer = SimpleNamespace(run=SimpleNamespace(rank=0, directory=tmp_path), step=1)
    alerting.after_log(trainer, {})
    usage.answers = True
    alerting.after_log(trainer, {})
    alerting.after_training(trainer)
    assert usage.calls == 2
    assert (tmp_path / "told").read_text() == "disk\n"


def test_a_request_to_stop_is_seen_once_the_disk_answers(tmp_path, stale):
    status.request_stop(tmp_path)
    stat = stale(os, "stat")
    trainer = SimpleNamespace(
        run=SimpleNamespace(rank=0, directory=tmp_path),
        config=SimpleNamespace(run=SimpleNamespace(max_hours=None)),
        store_error=None,
        asked_to_stop=False,
        step=1,
    )
    stops = Stops(None)
    stops.before_training(trainer)
    assert stops.votes(trainer)["stop"] is False
    stat.answers = True
    assert stops.votes(trainer)["stop"] is True


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "profile").write_text("no folder")
    trainer = SimpleNamespace(
        run=SimpleNamespace(rank=0, directory=tmp_path),
        engine=SimpleNamespace(device=SimpleNamespace(type="cpu")),
        state=SimpleNamespace(step=0),
        step=10,
    )
    profiling = Profiling()
    profiling.before_training(trainer)
    profiling.before_step(trainer)
    profiling.before_rewind(trainer)
    target = tmp_path / "profile/rank-00000.json"
    assert capsys.readouterr().err.endswith(f"warning: trainer.profile: {target} isn't written: File exists\n")
