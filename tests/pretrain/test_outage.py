"""A run beside an MLflow server that dies and comes back."""

import time

import pytest
from mlflow.tracking import MlflowClient

from pretrain.tracking import tracker as tracking
from pretrain.tracking.mlflow_run import FeedState, TrackedRun
from pretrain.tracking.tracker import Tracker
from tests.ports import free_port
from tests.pretrain.mlflow_server import Server

STEPS = 20


pytestmark = pytest.mark.usefixtures("feed_often")


def wait_for_failure(caplog):
    """Until the log says that MLflow can't be reached."""
    while not any("training goes on, will try again" in message for message in caplog.messages):
        time.sleep(0.05)


def wait_for_feed(folder):
    """Until MLflow has metrics of the run."""
    while not (state := FeedState.load(folder)) or not state.offsets:
        time.sleep(0.05)


def start(run_dir, uri):
    return Tracker(run_dir, TrackedRun("outage", "r", attempt=1), uri)


def steps_in_mlflow(uri, folder):
    """The steps of a run that MLflow has finished."""
    client, run_id = MlflowClient(tracking_uri=uri), FeedState.load(folder).run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    history = client.get_metric_history(run_id, "loss/train")
    assert all(point.value == 1 / point.step for point in history)
    return [point.step for point in history]


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_lacks_nothing(tmp_path, empty_mlflow, caplog):
    empty_mlflow(tmp_path)
    port = free_port()
    server = Server(tmp_path, port)
    try:
        tracker = start(tmp_path / "run", server.uri)
        for step in range(1, 3 * STEPS + 1):
            tracker.log(step, {"train/loss": 1 / step})
            if step == STEPS:
                wait_for_feed(tmp_path / "run")
                server.kill()
            elif step == STEPS + 1:
                wait_for_failure(caplog)
            elif step == 2 * STEPS:
                server = Server(tmp_path, port)
        tracker.close("FINISHED")
        assert steps_in_mlflow(server.uri, tmp_path / "run") == list(range(1, 3 * STEPS + 1))
    finally:
        server.kill()
    said = [message.partition(": ")[0].partition(" at ")[0] for message in caplog.messages]
    assert said == ["MLflow", "MLflow"], caplog.messages  # one line for the outage, one for its end
    assert "accepts metrics again" in caplog.messages[1]


@pytest.mark.slow
def test_a_run_that_ends_as_its_server_returns_leaves_no_gap(tmp_path, empty_mlflow, monkeypatch, caplog):
    """The feed that succeeds takes longer than a run waits for a server that is away."""
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_FEEDS", 3600.0)
    monkeypatch.setattr(tracking, "SECONDS_FOR_A_RETURN", 0.01)
    empty_mlflow(tmp_path)
    port = free_port()
    tracker = start(tmp_path / "run", f"http://127.0.0.1:{port}")
    tracker.log(1, {"train/loss": 1.0})
    wait_for_failure(caplog)
    server = Server(tmp_path, port)
    try:
        tracker.log(2, {"train/loss": 0.5})
        tracker.close("FINISHED")
        assert steps_in_mlflow(server.uri, tmp_path / "run") == [1, 2]
    finally:
        server.kill()


@pytest.mark.slow
def test_a_run_whose_server_is_gone_at_its_end_does_not_wait_for_the_rest(tmp_path, empty_mlflow, monkeypatch, caplog):
    """Though it was there at the last feed: it gets as long as one that has been away."""
    monkeypatch.setattr(tracking, "SECONDS_FOR_A_RETURN", 0.5)
    empty_mlflow(tmp_path)
    server = Server(tmp_path, free_port())
    tracker = start(tmp_path / "run", server.uri)
    tracker.log(1, {"train/loss": 1.0})
    wait_for_feed(tmp_path / "run")
    server.kill()
    tracker.close("FINISHED")  # the rest would have an hour
    assert "MLflow lacks the end of this run" in caplog.messages[-1]
