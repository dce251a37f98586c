"""What MLflow refuses, and what is deleted there: it is named in one line, and everything else arrives."""

import json
import os
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from mlflow.tracking import MlflowClient

from data_pipeline.base.errors import FailedError
from pretrain.run.metrics_file import MetricLog
from pretrain.training.tracking import tracker as tracking
from pretrain.training.tracking.feeder import Feeder
from pretrain.training.tracking.mlflow_store import FeedState, TrackedRun
from pretrain.training.tracking.tracker import Tracker, sync
from tests.support.mlflow_server import Server, refusing
from tests.support.ports import free_port
from tests.support.tables import each

LOSSES = {1: 2.0, 2: 1.5}


@pytest.fixture
def client(uri):
    return MlflowClient(tracking_uri=uri)


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")


def finished(folder: Path, **more) -> Path:
    """A run directory with losses and two files, which MLflow doesn't have yet."""
    run = TrackedRun(
        **{"experiment": "refusals", "run_name": "r", "attempt": 1, "status": "FINISHED", "ended": 9.0} | more
    )
    run.started = 8.0
    (folder / "artifacts").mkdir(parents=True)
    run.save(folder)
    for name in ("a.txt", "z.txt"):
        (folder / "artifacts" / name).write_text(name)
    log = MetricLog(folder, 1)
    for step, loss in LOSSES.items():
        log.log(step, {"train/loss": loss})
    log.close()
    return folder


def picture(folder: Path, name: str) -> str:
    """A file of the run; returns its path there."""
    path = folder / "artifacts/evaluation" / name / "step-00000001.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"png")
    return str(path.relative_to(folder))


def of_mlflow(client, folder):
    return client.get_run(FeedState.load(folder).run_id)


def has_the_rest(client, folder: Path) -> None:
    """MLflow has all of `finished`."""
    run = of_mlflow(client, folder)
    losses = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "train/loss")}
    assert (run.info.status, losses) == ("FINISHED", LOSSES)
    assert {"a.txt", "z.txt"} <= {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_file_that_mlflow_refuses_keeps_nothing_else_back_and_is_tried_again(tmp_path, uri, client):
    name = picture(finished(tmp_path), "attention")
    Feeder(tmp_path, TrackedRun.load(tmp_path), uri)  # creates the run
    run = of_mlflow(client, tmp_path)
    in_the_way = Path(url2pathname(urlsplit(run.info.artifact_uri).path)) / "evaluation"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("not a folder")
    with pytest.raises(FailedError, match=rf"^{uri}: {name}: .*Not a directory.* sync again to continue$"):
        sync(tmp_path, uri)
    has_the_rest(client, tmp_path)
    in_the_way.unlink()
    sync(tmp_path, uri)
    assert client.list_artifacts(run.info.run_id, "evaluation/attention")


def rows_of_no_time(folder):
    rows = [("Infinity", "1.0"), ("1", "NaN"), ("1", "-5.0"), (str(1 << 63), "1.0"), ("1", "1e300")]
    with (folder / "metrics.jsonl").open("a") as file:
        for step, at in rows:
            file.write(f'{{"step": {step}, "attempt": 1, "time": {at}, "metrics": {{"train/loss": 7.0}}}}\n')


def unusual_names(folder):
    """MLflow has fewer characters, and 250 of them."""
    names = ["a*b", "/a_b", "a//_b", "x" * 251, f"v/{'x' * 250}/..", f"v/{'x' * 245}/...", "", "_", "ä?"]
    run = TrackedRun.load(folder)
    run.parameters = dict.fromkeys(names, 1)
    run.save(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "attempt": 1, "time": 1.0, "metrics": dict.fromkeys(names, 7.0)}) + "\n")
    picture(folder, "attention/ä?")


@each(
    "adds",
    [
        unusual_names,
        rows_of_no_time,
        lambda folder: (folder / "artifacts" / os.fsdecode(b"b\xff.txt")).write_text("b"),
    ],
)
def test_mlflow_takes_unusual_names_and_rows(tmp_path, uri, client, adds):
    adds(finished(tmp_path / "run"))
    sync(tmp_path / "run", uri)
    has_the_rest(client, tmp_path / "run")


# ---- what someone has deleted in MLflow


def test_a_deleted_experiment_is_named_in_one_line(tmp_path, uri, client):
    run = finished(tmp_path, experiment="not needed any more")
    sync(run, uri)
    experiment = client.get_experiment_by_name("not needed any more").experiment_id
    client.delete_experiment(experiment)
    with pytest.raises(FailedError, match=rf"^{uri}: The experiment {experiment} must be in the 'active' state.*$"):
        sync(run, uri)
    client.restore_experiment(experiment)
    sync(run, uri)
    has_the_rest(client, run)


def test_a_run_that_is_deleted_while_it_trains_is_there_again(tmp_path, uri, client, monkeypatch):
    monkeypatch.setattr(tracking, "SECONDS_BEFORE_FEEDS", 0.0)
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_FEEDS", 0.05)
    monkeypatch.setattr(tracking, "SECONDS_FOR_THE_REST", 3600.0)
    tracker = Tracker(tmp_path, TrackedRun("refusals", "r", 1, key=uuid.uuid4().hex), uri)
    tracker.log(1, {"train/loss": 2.0})
    while not (state := FeedState.load(tmp_path)) or not state.offset:
        time.sleep(0.05)
    client.delete_run(state.run_id)
    tracker.log(2, {"train/loss": 1.5})
    while FeedState.load(tmp_path).run_id == state.run_id:
        time.sleep(0.05)
    tracker.close("FINISHED")
    run = of_mlflow(client, tmp_path)
    losses = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "train/loss")}
    assert (run.info.status, run.info.lifecycle_stage, losses) == ("FINISHED", "active", LOSSES)


# ---- a server


@pytest.fixture(scope="module")
def server(empty_mlflow, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    empty_mlflow(folder)
    started = Server(folder, free_port())
    yield started.uri
    started.kill()


@pytest.mark.slow
def test_a_server_that_refuses_one_file_gets_the_others(tmp_path, server):
    run, client = finished(tmp_path / "run"), MlflowClient(tracking_uri=server)
    with refusing(server, "PUT .*/a.txt", 413) as proxy:
        with pytest.raises(
            FailedError, match=r"artifacts/a.txt: 413 Client Error.*; what was sent is kept, sync again"
        ):
            sync(run, proxy.uri)
        found = of_mlflow(client, run)
        assert (found.info.status, found.data.metrics) == ("FINISHED", {"train/loss": 1.5})
        assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["z.txt"]
        proxy.refused = "^nothing"
        sync(run, proxy.uri)
    has_the_rest(client, run)


@pytest.mark.slow
def test_mlflow_prints_no_address_with_its_password(tmp_path, server, capsys):
    run = finished(tmp_path)
    sync(run, server.replace("//", "//me:hunter2@"))
    has_the_rest(MlflowClient(tracking_uri=server), run)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@each("status, said", [(400, "API request to"), (500, "ResponseError")])
def test_a_server_that_refuses_everything_is_one_line_with_its_answer(tmp_path, server, status, said):
    run = finished(tmp_path / "run")
    with (
        refusing(server, "", status) as proxy,
        pytest.raises(FailedError, match=rf"^{proxy.uri}: {said}.* {status} .*; what was sent is kept"),
    ):
        sync(run, proxy.uri)
    sync(run, server)
    has_the_rest(MlflowClient(tracking_uri=server), run)
