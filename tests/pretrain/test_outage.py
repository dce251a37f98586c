"""A run beside an MLflow server that dies and comes back, and beside one that accepts and never answers."""

import socket
import statistics
import time

import numpy as np
import pytest

from pretrain.run.metrics_file import read_metrics
from pretrain.tracking import tracker as tracking
from pretrain.tracking.mlflow_run import FeedState
from pretrain.tracking.store import answers
from pretrain.tracking.tracker import Tracker, sync
from tests.ports import free_port
from tests.pretrain.mlflow_server import Server

STEPS = 20
MATRIX = np.random.default_rng(0).random((1000, 1000), dtype=np.float32)


@pytest.fixture(autouse=True)
def feed_often(monkeypatch):
    monkeypatch.setattr(tracking, "SECONDS_BEFORE_FEEDS", 0.05)
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_FEEDS", 0.05)
    monkeypatch.setattr(tracking, "LONGEST_PAUSE", 1.0)


def wait_for_failure(caplog, meanwhile=lambda: None):
    """Until the log says that MLflow can't be reached."""
    while not any("training goes on, will try again" in message for message in caplog.messages):
        meanwhile()
        time.sleep(0.05)


def start(run_dir, uri):
    return Tracker(run_dir, attempt=1, run_name="r", uri=uri, experiment="outage")


def take_steps(tracker, first, number=STEPS):
    """Takes steps; returns the seconds that each waits for the tracker, and the median seconds of their arithmetic."""
    waits, work = [], []
    for step in range(first, first + number):
        began = time.perf_counter()
        MATRIX @ MATRIX
        logged = time.perf_counter()
        tracker.log(step, {"train/loss": 1 / step})
        waits.append(time.perf_counter() - logged)
        work.append(logged - began)
    return waits, statistics.median(work)


def usual_wait(folder):
    """The median seconds that a step waits for a tracker without MLflow."""
    with start(folder, None) as tracker:
        return statistics.median(take_steps(tracker, 1)[0])


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_lacks_nothing_and_costs_no_time(tmp_path, empty_mlflow, caplog):
    empty_mlflow(tmp_path)
    port = free_port()
    server = Server(tmp_path, port)
    try:
        tracker = start(tmp_path / "run", server.uri)
        waits, _ = take_steps(tracker, 1)
        while not (state := FeedState.load(tmp_path / "run")) or not state.offsets:
            time.sleep(0.05)
        server.kill()
        wait_for_failure(caplog, lambda: waits.extend(take_steps(tracker, 1 + len(waits), 1)[0]))
        without, work = take_steps(tracker, 1 + len(waits))
        server = Server(tmp_path, port)
        waits += without
        waits += take_steps(tracker, 1 + len(waits))[0]
        tracker.close("FINISHED", timeout=60)

        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=server.uri)
        run_id = FeedState.load(tmp_path / "run").run_id
        history = client.get_metric_history(run_id, "loss/train")
        assert [(point.step, point.value) for point in history] == [
            (step, 1 / step) for step in range(1, len(waits) + 1)
        ]
        assert client.get_run(run_id).info.status == "FINISHED"
    finally:
        server.kill()
    said = [message.partition(": ")[0].partition(" at ")[0] for message in caplog.messages]
    assert said == ["MLflow", "MLflow"], caplog.messages  # one line for the outage, one for its end
    assert "accepts metrics again" in caplog.messages[1]
    assert statistics.median(without) - usual_wait(tmp_path / "plain") < 0.02 * work


@pytest.mark.slow
def test_a_run_that_ends_as_its_server_returns_leaves_no_gap(tmp_path, empty_mlflow, monkeypatch, caplog):
    """The first feed takes longer than a run waits for a server that is away, and no other was tried meanwhile."""
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_FEEDS", 3600.0)
    monkeypatch.setattr(tracking, "SECONDS_FOR_A_RETURN", 0.01)
    empty_mlflow(tmp_path)
    port = free_port()
    tracker = start(tmp_path / "run", f"http://127.0.0.1:{port}")
    tracker.log(1, {"train/loss": 1.0})
    wait_for_failure(caplog)
    began = time.monotonic()
    assert not answers(f"http://127.0.0.1:{port}")
    assert time.monotonic() - began < 2
    server = Server(tmp_path, port)
    try:
        assert answers(server.uri)
        tracker.log(2, {"train/loss": 0.5})
        tracker.close("FINISHED", timeout=120)
        from mlflow.tracking import MlflowClient

        run_id = FeedState.load(tmp_path / "run").run_id
        client = MlflowClient(tracking_uri=server.uri)
        assert [point.step for point in client.get_metric_history(run_id, "loss/train")] == [1, 2]
        assert client.get_run(run_id).info.status == "FINISHED"
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("was_there", [False, True])
def test_a_run_whose_server_is_gone_at_its_end_waits_for_seconds(
    tmp_path, empty_mlflow, monkeypatch, caplog, was_there
):
    """Also if it was there at the last feed: it gets as long as one that has been away."""
    monkeypatch.setattr(tracking, "SECONDS_FOR_A_RETURN", 0.5)
    empty_mlflow(tmp_path)
    port = free_port()
    server = Server(tmp_path, port) if was_there else None
    tracker = start(tmp_path / "run", f"http://127.0.0.1:{port}")
    tracker.log(1, {"train/loss": 1.0})
    if server:
        while not (state := FeedState.load(tmp_path / "run")) or not state.offsets:
            time.sleep(0.05)
        server.kill()
    began = time.monotonic()
    tracker.close("FINISHED")
    assert time.monotonic() - began < 10
    assert "MLflow lacks the end of this run" in caplog.messages[-1]


def test_a_server_that_never_answers_costs_no_time_and_nothing_is_lost(tmp_path, empty_mlflow):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        tracker = start(tmp_path / "run", f"http://127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()  # the tracker's request is under way
        with connection:
            waits, work = take_steps(tracker, 1)
            began = time.monotonic()
            tracker.close("FINISHED", timeout=1)
            assert time.monotonic() - began < 3
    assert statistics.median(waits) - usual_wait(tmp_path / "plain") < 0.02 * work
    assert [row.step for row in read_metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert sync(tmp_path / "run", empty_mlflow(tmp_path)) == STEPS
