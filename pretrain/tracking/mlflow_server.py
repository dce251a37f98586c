"""MLflow's store, a server or a sqlite file: its client, the names that it takes, and its server on this machine."""

import contextlib
import logging
import os
import re
import socket
import sys
from pathlib import Path

from data_pipeline.foundation.atomic import temporary_path
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import MASK, masked, without_login
from data_pipeline.foundation.lazy_imports import imported_at_first_use
from pretrain.tracking.mlflow_run import STATE_FILE, FeedState

with imported_at_first_use():
    from mlflow import tracking  # 3.8 s and 170 MB, and many who need this module need no client

# retries are the feeder's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_KEY_LENGTH = 250  # MLflow's limit (mlflow/utils/validation.py)
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file
# MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash: losses come
# first, then evaluations, and seconds and sizes last. The first pattern that fits a name of metrics.jsonl counts.
_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/(.+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]
_HOST = "127.0.0.1"
_TRAINING = "?workflowType=machine_learning"  # otherwise the UI shows a run as the evaluation of a chat application


def client(uri: str) -> "tracking.MlflowClient":
    """An MLflow client."""
    kind = tracking.MlflowClient  # imports MLflow, which sets the level of its logger
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return kind(tracking_uri=uri)


def create_tables(uri: str) -> None:
    """Creates the tables of a new sqlite file, in another file, which then gets the name.

    If a process is killed while MLflow creates them, MLflow would find some, and never create the rest.
    """
    database = sqlite_file(uri)
    if database is None or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    new = temporary_path(database)
    client(f"sqlite:///{new}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):  # of runs that start together, the first one's stays
        database.hardlink_to(new)
    new.unlink()


def absolute_uri(uri: str) -> str:
    """`uri`; the path of a sqlite file becomes absolute, so that it doesn't depend on the working directory."""
    file = sqlite_file(uri)
    return f"sqlite:///{file}" if file else uri


def sqlite_file(uri: str) -> Path | None:
    """The file of `sqlite:///relative` or `sqlite:////absolute`; None for any other uri."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def safe_key(name: str) -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_KEY_LENGTH].rstrip("/") or "_"


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks."""
    return masked((str(error).strip().splitlines() or [type(error).__name__])[0][:300])


def dashboard(run_dir: Path | None, uri: str, port: int = 5000) -> None:
    """Prints the address of the charts, and replaces this process by MLflow's server, which serves until Ctrl-C.

    With `run_dir` they are the charts of that run in the run's own MLflow, and `uri` is ignored, unless that has the
    password which the run has not recorded; otherwise it is the list of experiments. If MLflow already runs as a
    server, it only prints the address. Raises UserError if there is nothing to show.
    """
    state = FeedState.load(run_dir) if run_dir else None
    if run_dir and state is None:
        raise UserError(
            f"{run_dir}: no {STATE_FILE} here, so MLflow has no data of this run; to send it: pretrain sync {run_dir}"
        )
    given, uri = absolute_uri(uri), state.tracking_uri if state else absolute_uri(uri)
    runs = f"#/experiments/{state.experiment_id}/runs" if state else "#/experiments"
    page = (f"{runs}/{state.run_id}/model-metrics" if state else runs) + _TRAINING
    if uri.startswith(("http://", "https://")):
        print(f"{without_login(uri).rstrip('/')}/{page}")
        return
    if MASK in uri:
        if masked(given) != uri:
            raise UserError(f"{run_dir}: the password of {uri} isn't recorded; give --uri with it")
        uri = given
    database = sqlite_file(uri)
    if database and not database.exists():
        raise UserError(f"{database}: no such file, so there is nothing to show yet; runs create it when they train")
    address = f"http://{_HOST}:{(port := _free_port(port))}"
    print(f"{address}/{page}")
    if state:
        print(f"with the experiment's other runs: {address}/{runs}{_TRAINING}&compareRunsMode=CHART")
    print("MLflow starts, which takes some seconds. Ctrl-C ends it.", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    if database:
        command += ["--default-artifact-root", (database.parent / ARTIFACTS).as_uri()]
    # one process that serves pages: MLflow's job runners are for evaluating language-model applications
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    environment |= {"MLFLOW_BACKEND_STORE_URI": uri}  # a command line is public, and the URI may have a password
    os.execve(sys.executable, command, environment)


def _free_port(port: int) -> int:
    """`port`, or a free one if something listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT counts as free
        try:
            probe.bind((_HOST, port))
        except OSError:
            probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
