"""A network disk that doesn't answer, or a full one, ends nothing that only watches a run."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import head
from pretrain.run import rank_logs, status
from pretrain.run.world import World
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


def test_a_request_to_stop_is_seen_once_the_disk_answers(tmp_path, stale):
    status.request_stop(tmp_path)
    stat = stale(os, "stat")
    trainer = SimpleNamespace(
        run=SimpleNamespace(world=World.on_this_node(), directory=tmp_path),
        config=SimpleNamespace(run=SimpleNamespace(max_hours=None)),
        store_error=None,
        step=1,
    )
    stops = Stops(None)
    stops.before_training(trainer)
    assert stops.votes(trainer)["stop"] is False
    stat.answers = True
    assert stops.votes(trainer)["stop"] is True


def test_a_log_is_followed_until_the_disk_answers(tmp_path, stale, monkeypatch):
    """The last lines of a log that can't be read are none."""
    monkeypatch.setattr(head, "_DELAY_SECONDS", 0.01)
    (log := tmp_path / "rank-00000.log").write_text("step 1\n")
    stat, follower = stale(os, "stat"), head.Follower(log)
    with follower:
        while stat.calls < 2 and follower.is_alive():
            time.sleep(0.01)
        stat.answers = True
        assert follower.is_alive()
    assert follower.shown == len("step 1\n")
    stale(Path, "open")
    assert rank_logs.last_lines(log) == []


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "profile").write_text("no folder")
    trainer = SimpleNamespace(
        run=SimpleNamespace(world=World.on_this_node(), directory=tmp_path),
        engine=SimpleNamespace(device=SimpleNamespace(type="cpu")),
        state=SimpleNamespace(step=0),
        step=10,
    )
    profiling = Profiling()
    profiling.before_training(trainer)
    profiling.before_step(trainer, [])
    profiling.before_rewind(trainer)
    target = tmp_path / "profile/rank-00000.json"
    assert capsys.readouterr().err.endswith(f"warning: trainer.profile: {target} isn't written: File exists\n")
