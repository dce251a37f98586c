"""Tracking with the real MLflow on sqlite, and with its real server over HTTP. No network is needed."""

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path

import matplotlib.figure
import mlflow
import psutil
import pytest
from mlflow.tracking import MlflowClient

from data_pipeline.base.errors import FailedError, UserError
from pretrain.evaluate import record
from pretrain.evaluate.hook import EvalResult
from pretrain.run.metrics_file import MetricLog, read_metrics
from pretrain.training.tracking import mlflow_store
from pretrain.training.tracking import tracker as tracking
from pretrain.training.tracking.dashboard import dashboard
from pretrain.training.tracking.feeder import Feeder
from pretrain.training.tracking.mlflow_store import NOTE, FeedState, TrackedRun
from pretrain.training.tracking.tracker import Tracker, sample_machine, sync
from tests.support.mlflow_server import Server, answers
from tests.support.ports import free_port
from tests.support.tables import each


@pytest.fixture(autouse=True)
def _feed_often(monkeypatch):
    """MLflow is fed without pauses, and may take longer than a test."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3600")
    monkeypatch.setattr(tracking, "SECONDS_BEFORE_FEEDS", 0.05)
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_FEEDS", 0.05)
    monkeypatch.setattr(tracking, "SECONDS_FOR_THE_REST", 3600.0)
    monkeypatch.setattr(tracking, "LONGEST_PAUSE", 1.0)


@pytest.fixture
def client(uri):
    return MlflowClient(tracking_uri=uri)


def start(run_dir, uri, attempt=1, **more):
    return Tracker(run_dir, TrackedRun("wikipedia", "t5-small", attempt, **more), uri)


@contextlib.contextmanager
def tracked(run_dir, uri, attempt=1, **more):
    """A tracker of a run that finishes with the block."""
    tracker = start(run_dir, uri, attempt, **more)
    yield tracker
    tracker.close("FINISHED")


def run_id(run_dir):
    state = FeedState.load(run_dir)
    assert state
    return state.run_id


def points(client, run_dir, name):
    """Every point of a metric in MLflow."""
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id(run_dir), name)]


@each("answers", [True, False])
def test_the_first_connection_ends_when_mlflow_has_answered_or_refused(tmp_path, uri, answers, monkeypatch):
    monkeypatch.setattr(tracking, "SECONDS_BEFORE_FEEDS", 3600.0)
    with tracked(tmp_path, uri if answers else "http://127.0.0.1:9") as tracker:
        assert tracker.connects
    assert not tracker.connects
    assert not start(tmp_path / "local", None).connects


# ---- the local log


def test_a_line_holds_step_attempt_time_and_metrics_and_no_number_that_json_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1767225600.25)
    MetricLog(tmp_path, attempt=3).log(10, {"train/loss": 9.5, "nan": math.nan, "up": math.inf, "down": -math.inf})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = {"train/loss": 9.5, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    assert json.loads(line) == {"step": 10, "attempt": 3, "time": 1767225600.25, "metrics": metrics}
    ((loss, nan, up, down),) = (row.metrics.values() for row in read_metrics(tmp_path))
    assert (loss, math.isnan(nan), up, down) == (9.5, True, math.inf, -math.inf)


@each("torn", ['{"step": 20, "att', '{"step": 20, "attempt": 1, "time": 1.0, "metrics": {"a": 2.0}}'])
def test_torn_last_line_does_not_reach_into_the_next_attempt(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "attempt": 1, "time": 1.0, "metrics": {"a": 1.0}}\n' + torn)
    assert [row.step for row in read_metrics(path)] == [10]  # a line without an end may still be unfinished
    MetricLog(tmp_path, attempt=2).log(30, {"a": 3.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] in ([10, 30], [10, 20, 30])
    assert [row.step for row in read_metrics(path)] == ([10, 20, 30] if torn.endswith("}") else [10, 30])


def test_highest_attempt_of_a_step_counts(tmp_path):
    for attempt, steps in ((1, (10, 20, 30, 40)), (2, (30, 40, 50)), (3, (40,))):
        log = MetricLog(tmp_path, attempt)
        for step in steps:
            log.log(step, {"loss": attempt})
        log.log(steps[-1], {"validation/loss": attempt})
    rows = read_metrics(tmp_path)
    assert [(row.step, row.metrics["loss"]) for row in rows] == [(10, 1), (20, 1), (30, 2), (40, 3), (50, 2)]
    assert [row.metrics.get("validation/loss") for row in rows] == [None, None, None, 3, 2]


def test_row_that_the_disk_refuses_is_written_later(tmp_path, caplog):
    tracker = start(tmp_path, None)
    log = tracker._log
    with Path("/dev/full").open("wb", buffering=0) as full:
        working, log._file = log._file, full
        tracker.log(1, {"a": 1.0})
        tracker.log(2, {"a": 2.0})
    log._file = working
    tracker.log(3, {"a": 3.0})
    tracker.close("FINISHED")
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(caplog.records) == 1


def test_without_uri_only_the_local_log(tmp_path):
    with tracked(tmp_path, None) as tracker:
        tracker.log(1, {"a": 1.0})
    assert not (tmp_path / "mlflow.json").exists()
    assert TrackedRun.load(tmp_path).status == "FINISHED"
    with pytest.raises(UserError, match=r"tracking\.mlflow\.uri"):
        sync(tmp_path)


# ---- MLflow


def test_run_is_described_in_full(tmp_path, uri, client):
    (tmp_path / "config.yaml").write_text("run: {name: t5-small}\n")
    tracker = start(
        tmp_path,
        uri,
        parameters={
            "optimizer": {"name": "adamw_scale", "betas": [0.9, 0.999], "more": {}},
            "data": [{"weight": None}, {"weight": True}],
            "odd [key]": "x" * 9000,
        },
        tags={"mlflow.source.git.commit": "c0ffee", "hosts": "node-1", "ranks": "8"},
    )
    tracker.log(10, {"train/loss": 9.5, "validation/c4 [en]//x/loss": math.nan})
    (tmp_path / "artifacts/evaluation").mkdir(parents=True)
    (tmp_path / "artifacts/evaluation/samples.json").write_text('{"columns": [], "data": []}')
    tracker.close("FINISHED")

    run = client.get_run(run_id(tmp_path))
    assert (run.info.status, run.info.run_name.split()[0]) == ("FINISHED", "t5-small")
    assert run.info.start_time <= run.info.end_time
    assert run.data.params == {
        "optimizer.name": "adamw_scale",
        "optimizer.betas": "[0.9, 0.999]",
        "optimizer.more": "{}",
        "data.0.weight": "None",
        "data.1.weight": "True",
        "odd _key_": "x" * 6000,
    }
    assert run.data.tags.items() >= {"ranks": "8", "mlflow.source.git.commit": "c0ffee"}.items()
    assert run.data.tags["mlflow.user"]
    assert {"train/loss", "validation/c4 _en_/x/loss"} == set(run.data.metrics)
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml", "evaluation"]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "evaluation/samples.json", "type": "table"}]
    assert Path(mlflow_store.sqlite_file(uri)).parent.joinpath("mlartifacts").is_dir()
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_resumed_run_goes_on_under_the_same_id(tmp_path, uri, client):
    note = {NOTE: "of the run"}
    with tracked(tmp_path, uri, parameters={"max_steps": 40}, tags=note) as tracker:
        for step in (10, 20, 30, 40):
            tracker.log(step, {"train/loss": 1 / step})
    first = run_id(tmp_path)
    assert client.get_run(first).data.tags[NOTE] == "of the run"
    client.set_tag(first, NOTE, "diverged")  # what someone wrote stays

    tracker = start(tmp_path, uri, attempt=2, parameters={"max_steps": 60}, tags=note)
    tracker.log(40, {"train/loss": 0.5, "validation/loss": 3.0})  # repeated, with another result
    tracker.log(50, {"train/loss": 1 / 50})
    tracker.close("KILLED")

    assert run_id(tmp_path) == first
    expected = [(10, 1 / 10), (20, 1 / 20), (30, 1 / 30), (40, 1 / 40), (40, 0.5), (50, 1 / 50)]
    assert points(client, tmp_path, "train/loss") == expected
    assert points(client, tmp_path, "validation/loss") == [(40, 3.0)]
    run = client.get_run(first)
    assert run.info.status == "KILLED"
    assert run.data.params == {"max_steps": "40"}
    assert run.data.tags["changed.max_steps"] == "40 → 60 (attempt 2)"
    assert run.data.tags[NOTE] == "diverged"
    start(tmp_path, uri, attempt=3).close("FAILED")
    assert client.get_run(first).info.status == "FAILED"


@pytest.mark.slow
def test_a_supervisor_has_mlflow_told_that_a_run_has_failed(tmp_path, uri, client, capfd):
    description = TrackedRun("wikipedia", "mine", 1, uri=uri, started=1000.0)
    Feeder(tmp_path, description, uri).feed()
    description.save(tmp_path)
    run = run_id(tmp_path)
    assert tracking.record_end(tmp_path, 2000.0)
    assert not tracking.record_end(tmp_path)
    tracking.sync_apart(tmp_path)
    assert (client.get_run(run).info.status, client.get_run(run).info.end_time) == ("FAILED", 2_000_000)
    assert capfd.readouterr().err == ""


def child(code, *arguments):
    """A Python process as a user would start it: MLflow behaves differently when it detects a test."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTEST_CURRENT_TEST", "CI")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


TRAIN_BESIDE_OTHERS = """
import socket, sys
from pathlib import Path
connections = []
socket.socket.connect = lambda self, address: connections.append(address)
from pretrain.training.tracking import tracker as tracking
tracking.SECONDS_FOR_THE_REST = 3600.0
from pretrain.training.tracking.mlflow_store import TrackedRun
tracker = tracking.Tracker(Path(sys.argv[1]), TrackedRun("together", "r", attempt=1), sys.argv[2])
for step in range(1, 301):
    tracker.log(step, {"loss": step})
tracker.close("FINISHED")
sys.exit(f"reached for the network: {connections}" if connections else 0)
"""


@pytest.mark.slow
def test_runs_that_start_together_share_a_new_database_and_touch_no_network(tmp_path):
    uri = f"sqlite:///{tmp_path}/new-directory/mlflow.db"
    processes = [child(TRAIN_BESIDE_OTHERS, tmp_path / str(number), uri) for number in range(2)]
    for process in processes:
        output = process.communicate()
        assert (process.returncode, *output) == (0, "", "")
    client = MlflowClient(tracking_uri=uri)
    assert sorted(experiment.name for experiment in client.search_experiments()) == ["Default", "together"]
    for number in range(2):
        assert points(client, tmp_path / str(number), "loss") == [(step, step) for step in range(1, 301)]


@pytest.mark.slow
def test_a_database_is_whole_though_the_first_run_was_killed_while_it_was_created(tmp_path, monkeypatch):
    database, connect = tmp_path / "mlflow.db", mlflow_store.client

    def killed(uri):
        mlflow_store.sqlite_file(uri).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow_store, "client", killed)
    with pytest.raises(KeyboardInterrupt):
        mlflow_store.create_tables(f"sqlite:///{database}")
    monkeypatch.setattr(mlflow_store, "client", connect)
    assert not database.exists()
    mlflow_store.create_tables(f"sqlite:///{database}")
    assert MlflowClient(f"sqlite:///{database}").search_experiments()


@each("answers", ["refuses", "stays silent"])
def test_training_does_not_wait_for_an_mlflow_that_is_not_there(tmp_path, uri, client, caplog, monkeypatch, answers):
    monkeypatch.setattr(tracking, "SECONDS_FOR_THE_REST", 2.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers == "stays silent":
            server.listen()
        tracker = start(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        for step in range(250):
            tracker.log(step, {"loss": step})
        assert len(read_metrics(tmp_path)) == 250
        tracker.close("FINISHED")
    assert any(f"pretrain sync {tmp_path}" in message for message in caplog.messages)
    assert len(caplog.messages) <= 2
    assert [sync(tmp_path, uri), sync(tmp_path, uri)] == [250, 0]
    assert points(client, tmp_path, "loss") == [(step, step) for step in range(250)]


def test_a_run_trains_on_where_mlflow_cannot_be_imported(tmp_path, uri, monkeypatch, caplog):
    monkeypatch.delattr("pretrain.training.tracking.feeder", raising=False)  # as before its first use
    monkeypatch.setitem(sys.modules, "pretrain.training.tracking.feeder", None)
    with tracked(tmp_path, uri) as tracker:
        tracker.log(1, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1
    assert any("training continues, will try again" in message for message in caplog.messages)


def test_sync_that_fails_says_so(tmp_path):
    with tracked(tmp_path, None) as tracker:
        tracker.log(1, {"loss": 1.0})
    (tmp_path / "file").touch()
    with pytest.raises(FailedError, match="sync again"):
        sync(tmp_path, f"sqlite:///{tmp_path}/file/mlflow.db")


def test_a_password_is_used_but_neither_recorded_nor_logged(tmp_path, uri, client, caplog):
    parameters = {"data": {"train": [{"corpus": "https://me:hunter2@example.org/c4"}]}}
    with tracked(tmp_path / "one", uri, parameters=parameters, tags={"proxy": "http://me:hunter2@proxy"}):
        pass
    found = client.get_run(FeedState.load(tmp_path / "one").run_id).data
    assert found.params["data.train.0.corpus"] == "https://me:***@example.org/c4"
    assert found.tags["proxy"] == "http://me:***@proxy"
    tracker = start(tmp_path / "two", "http://me:hunter2@127.0.0.1:9", parameters=parameters)
    tracker.close("FINISHED")
    assert any("MLflow at http://me:***@127.0.0.1:9: " in message for message in caplog.messages)
    assert "hunter2" not in caplog.text
    written = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert [text for text in written if "hunter2" in text] == []
    with pytest.raises(UserError, match="isn't recorded; give --uri with it"):
        sync(tmp_path / "two")


@pytest.fixture
def run_dir(whole, tmp_path):
    """A copy of a finished run with four checkpoints, which MLflow doesn't have yet."""
    shutil.copytree(whole / "adamw/run", tmp_path / "run")
    run = TrackedRun.load(tmp_path / "run")
    run.key, run.experiment = uuid.uuid4().hex, tmp_path.name
    run.save(tmp_path / "run")
    return tmp_path / "run"


def test_feeding_a_run_again_changes_nothing(run_dir, uri, client):
    sync(run_dir, uri)
    state = FeedState.load(run_dir)
    curve = [(one.step, one.value) for one in client.get_metric_history(state.run_id, "train/loss")]
    assert curve == [(row.step, row.metrics["train/loss"]) for row in read_metrics(run_dir)]
    (run_dir / "mlflow.json").unlink()  # as after a kill before it was written
    sync(run_dir, uri)
    assert FeedState.load(run_dir).run_id == state.run_id
    assert [(one.step, one.value) for one in client.get_metric_history(state.run_id, "train/loss")] == curve


def test_a_copied_run_that_trains_is_another_run_in_mlflow_and_a_moved_run_is_not(tmp_path, uri, client):
    first, copied, moved = (tmp_path / name for name in ("first", "copied", "moved"))
    with tracked(first, uri) as tracker:
        tracker.log(10, {"train/loss": 4.0})
    shutil.copytree(first, copied)
    with tracked(copied, uri, attempt=2) as tracker:
        tracker.log(20, {"train/loss": 3.0})
    with tracked(copied, uri, attempt=3) as tracker:
        tracker.log(30, {"train/loss": 2.0})
    assert points(client, copied, "train/loss") == [(10, 4.0), (20, 3.0), (30, 2.0)]
    of_first = run_id(first)
    assert points(client, first, "train/loss") == [(10, 4.0)]
    first.rename(moved)
    with tracked(moved, uri, attempt=2) as tracker:
        tracker.log(20, {"train/loss": 3.5})
    assert run_id(moved) == of_first
    assert points(client, moved, "train/loss") == [(10, 4.0), (20, 3.5)]


def test_a_run_keeps_its_place_in_mlflow_where_its_directory_has_two_names_or_is_not_recorded(tmp_path):
    def key(run_dir):
        start(run_dir, None).close("FINISHED")
        return json.loads((run_dir / "tracking.json").read_text())["key"]

    of_run = key(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    description = json.loads((tmp_path / "run/tracking.json").read_text())
    description["directory"] = str(tmp_path / "link")
    (tmp_path / "run/tracking.json").write_text(json.dumps(description))
    assert key(tmp_path / "run") == of_run
    del description["directory"]
    (tmp_path / "run/tracking.json").write_text(json.dumps(description))
    assert key(tmp_path / "run") == of_run


def test_rows_after_those_that_a_power_cut_took_are_sent(tmp_path, uri, client):
    """mlflow.json survived, and counts rows that metrics.jsonl lost."""
    with tracked(tmp_path, uri) as tracker:
        for step in (10, 20, 30):
            tracker.log(step, {"loss": 1 / step})
    metrics = tmp_path / "metrics.jsonl"
    first = metrics.read_bytes().splitlines(keepends=True)[0]
    assert FeedState.load(tmp_path).offset == metrics.stat().st_size
    metrics.write_bytes(first)
    with tracked(tmp_path, uri, attempt=2) as tracker:
        for step in (20, 30, 40):
            tracker.log(step, {"loss": 2 / step})
    of_both = [(10, 1 / 10), (20, 1 / 20), (20, 2 / 20), (30, 1 / 30), (30, 2 / 30), (40, 2 / 40)]
    assert sorted(points(client, tmp_path, "loss")) == of_both


def test_tables_are_what_mlflow_itself_would_log_and_pictures_are_artifacts(tmp_path, uri, client):
    mlflow.set_tracking_uri(uri)  # which `load_table` asks
    figure = matplotlib.figure.Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    rows = [{"given": "a <extra_id_0>", "written": "a b"}, {"given": "c", "written": None}]
    start(tmp_path, None).close("FINISHED")
    record.keep(
        record.directory(tmp_path), 5, EvalResult(tables={"samples": rows}, images={"attention/layer-1": figure})
    )
    record.keep(record.directory(tmp_path), 10, EvalResult(tables={"samples": rows}))
    sync(tmp_path, uri)
    state = FeedState.load(tmp_path)
    table = client.load_table(state.experiment_id, "evaluation/samples.json", [state.run_id])
    assert list(table["step"]) == [5, 5, 10, 10]
    assert list(table["given"]) == ["a <extra_id_0>", "c"] * 2
    folder = "evaluation/attention/layer-1"
    assert [file.path for file in client.list_artifacts(state.run_id, folder)] == [f"{folder}/step-00000005.png"]


# ---- system metrics


@pytest.fixture
def _sample_often(monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setattr(tracking, "SECONDS_BETWEEN_MONITORS", 0.05)


@contextlib.contextmanager
def sampling(run_dir, uri, *nodes):
    """MLflow samples machines with these names, each of which is this one."""
    ended = threading.Event()
    threads = [threading.Thread(target=sample_machine, args=(run_dir, uri, node, ended), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    yield
    ended.set()


def sampled(client, run_dir, *names):
    """The steps of these metrics, once each has one."""
    while not FeedState.load(run_dir):
        time.sleep(0.05)
    while not all(found := [[step for step, _ in points(client, run_dir, name)] for name in names]):
        time.sleep(0.05)
    return found


@pytest.mark.usefixtures("_sample_often")
def test_mlflow_samples_each_machine_of_a_run(tmp_path, uri, client):
    """Both machines are this one; the second attempt is on one machine."""
    names = ("cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage")
    nodes = ("node-1", "node-2")
    with tracked(tmp_path, uri), sampling(tmp_path, uri, *nodes):
        two = sampled(client, tmp_path, *(f"system/{node}/{one}" for node in nodes for one in names))
    with tracked(tmp_path, uri, attempt=2), sampling(tmp_path, uri, None):
        one = sampled(client, tmp_path, *(f"system/{name}" for name in names))
    assert {steps[0] for steps in two} == {0}
    assert min(steps[0] for steps in one) > 0  # the first attempt's steps are continued


@pytest.mark.slow
@pytest.mark.usefixtures("_sample_often")
def test_samples_begin_again_when_a_server_comes_back(tmp_path, serve, caplog):
    server, run, cpu = serve(), tmp_path / "run", "system/cpu_utilization_percentage"
    client = MlflowClient(serve.uri)
    with tracked(run, serve.uri) as tracker, sampling(run, serve.uri, None):
        (before,) = sampled(client, run, cpu)
        server.kill()
        tracker.log(1, {"loss": 1.0})
        wait_for_failure(caplog)
        serve()
        while len(points(client, run, cpu)) < len(before) + 50:
            time.sleep(0.05)


# ---- a server that dies and comes back


@pytest.fixture
def serve(tmp_path, empty_mlflow):
    """Starts a server, always at the same address and with the same database."""
    empty_mlflow(tmp_path)
    port, started = free_port(), []

    def again():
        started.append(Server(tmp_path, port))
        return started[-1]

    again.uri = f"http://127.0.0.1:{port}"
    yield again
    for server in started:
        server.kill()


def wait_for_failure(caplog):
    """Until the log says that MLflow can't be reached."""
    while not any("training continues, will try again" in message for message in caplog.messages):
        time.sleep(0.05)


def wait_for_feed(folder):
    """Until MLflow has metrics of the run."""
    while not (state := FeedState.load(folder)) or not state.offset:
        time.sleep(0.05)


def is_in_mlflow(uri, folder, losses):
    client = MlflowClient(tracking_uri=uri)
    assert client.get_run(run_id(folder)).info.status == "FINISHED"
    assert points(client, folder, "loss") == losses


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_lacks_nothing(tmp_path, serve, caplog):
    server, run = serve(), tmp_path / "run"
    tracker = start(run, server.uri)
    for step in range(1, 61):
        tracker.log(step, {"loss": 1 / step})
        if step == 20:
            wait_for_feed(run)
            server.kill()
        elif step == 21:
            wait_for_failure(caplog)
        elif step == 40:
            serve()
    tracker.close("FINISHED")
    is_in_mlflow(server.uri, run, [(step, 1 / step) for step in range(1, 61)])
    said = [message.partition(": ")[0].partition(" at ")[0] for message in caplog.messages]
    assert said == ["MLflow", "MLflow"], caplog.messages  # one line for the outage, one for its end
    assert "accepts metrics again" in caplog.messages[1]


@pytest.mark.slow
def test_a_run_whose_server_is_gone_at_its_end_does_not_wait_for_the_rest(tmp_path, serve, caplog):
    server = serve()
    tracker = start(tmp_path / "run", server.uri)
    tracker.log(1, {"loss": 1.0})
    wait_for_feed(tmp_path / "run")
    server.kill()
    tracker.close("FINISHED")  # the rest would have an hour
    assert "MLflow lacks the end of this run" in caplog.messages[-1]


# ---- the dashboard


DASHBOARD = """
import sys
from pathlib import Path
from pretrain.training.tracking.dashboard import dashboard
from pretrain.training.tracking.feeder import Feeder
dashboard(Path(sys.argv[1]), None, port=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_dashboard_serves_the_run_and_ends_with_its_server(tmp_path, uri):
    start(tmp_path, uri).close("FINISHED")
    process = child(DASHBOARD, tmp_path, port := free_port())
    try:
        address, page = process.stdout.readline().strip().split("/#/")
        assert address == f"http://127.0.0.1:{port}"
        state = FeedState.load(tmp_path)
        assert page.startswith(f"experiments/{state.experiment_id}/runs/{state.run_id}/model-metrics")
        while not answers(address):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        servers = psutil.Process(process.pid).children(recursive=True)
        with urllib.request.urlopen(address) as main_page:
            assert b"<title>MLflow</title>" in main_page.read()
        assert MlflowClient(address).get_run(state.run_id).info.run_name == "t5-small"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert len(servers) >= 1
    psutil.wait_procs(servers)  # the kernel takes a moment


def test_dashboard_of_nothing_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"pretrain sync"):
        dashboard(tmp_path, None)
    with pytest.raises(UserError, match="no such file"):
        dashboard(None, f"sqlite:///{tmp_path}/mlflow.db")


def test_the_dashboard_of_a_copied_run_says_how_to_send_it(tmp_path):
    FeedState(f"sqlite:///{tmp_path}/elsewhere.db", "1", "f" * 32).save(tmp_path)
    with pytest.raises(UserError, match=rf"elsewhere\.db: no such file; .*: pretrain sync {tmp_path} --uri sqlite:"):
        dashboard(tmp_path, None)
