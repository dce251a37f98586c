"""Serves the MLflow UI on this machine and opens it at the charts of a run."""

import os
import socket
import sqlite3
import sys
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.processes import Process, ProcessGroup
from data_pipeline.foundation.secrets import MASK, masked, without_login
from data_pipeline.foundation.signals import caught
from pretrain.tracking.mlflow_run import STATE_FILE, FeedState
from pretrain.tracking.store import ARTIFACTS, NO_TELEMETRY, absolute_uri, answers, sqlite_file, store_lock

_HOST = "127.0.0.1"
_TRAINING = "?workflowType=machine_learning"  # otherwise the UI shows a run as the evaluation of a chat application
_SECONDS_TO_START = 120.0
_SECONDS_TO_STOP = 10.0
_LAST_LINES = 50  # of a server that failed


def dashboard(run_dir: Path | None, uri: str, port: int = 5000, open_browser: bool = True) -> None:
    """Serves the MLflow UI until Ctrl-C or SIGTERM and prints its address.

    With `run_dir` it opens the charts of that run in the run's own MLflow, and ignores `uri`, unless that has the
    password which the run has not recorded; otherwise it opens the list of experiments. If MLflow already runs as a
    server, it only prints the address. Raises UserError if there is nothing to show.
    """
    state = _feed_state(run_dir) if run_dir else None
    given, uri = absolute_uri(uri), state.tracking_uri if state else absolute_uri(uri)
    runs = f"#/experiments/{state.experiment_id}/runs" if state else "#/experiments"
    page = (f"{runs}/{state.run_id}/model-metrics" if state else runs) + _TRAINING
    if uri.startswith(("http://", "https://")):
        _show(f"{without_login(uri).rstrip('/')}/{page}", open_browser)
        return
    if MASK in uri:
        if masked(given) != uri:
            raise UserError(f"{run_dir}: the password of {uri} isn't recorded; give --uri with it")
        uri = given
    database = sqlite_file(uri)
    if database and not database.exists():
        raise UserError(f"{database}: no such file, so there is nothing to show yet; runs create it when they train")
    free = _free_port(port)
    if free != port:
        print(f"port {port} is in use, taking {free}", flush=True)
    address = f"http://{_HOST}:{free}"
    # a run that has just begun may still be creating the tables, and the server would create them too
    with suppress(OSError, sqlite3.Error), store_lock(uri):
        pass
    with caught() as received, ProcessGroup(_SECONDS_TO_STOP) as group:
        server = _start(group, uri, free)
        print("starting the MLflow UI ", end="", flush=True)
        try:
            _wait_until_it_answers(address, server, received)
            if not received:
                print(" ready, Ctrl-C ends it", flush=True)
                _show(f"{address}/{page}", open_browser)
                if state:
                    others = f"{address}/{runs}{_TRAINING}&compareRunsMode=CHART"
                    print(f"with the experiment's other runs: {others}", flush=True)
            if group.watch(stop=lambda: received):
                raise FailedError(f"the MLflow server stopped unexpectedly, with exit code {server.code}")
        except FailedError:
            print("", *server.last_lines(_LAST_LINES), sep="\n", file=sys.stderr, flush=True)
            raise
        print("\nended", flush=True)


def _feed_state(run_dir: Path) -> FeedState:
    state = FeedState.load(run_dir)
    if state is None:
        raise UserError(
            f"{run_dir}: no {STATE_FILE} here, so MLflow has no data of this run; to send it: pretrain sync {run_dir}"
        )
    return state


def _show(url: str, open_browser: bool) -> None:
    print(url, flush=True)
    if open_browser:
        webbrowser.open(url)


def _free_port(port: int) -> int:
    """`port`, or the first one above it that nothing listens on."""
    for candidate in range(port, min(port + 100, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT counts as free
            try:
                probe.bind((_HOST, candidate))
            except OSError:
                continue
            return candidate
    raise UserError(f"no free port from {port} on")


def _start(group: ProcessGroup, uri: str, port: int) -> Process:
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", _HOST, "--port", str(port), "--workers", "1"]
    if database := sqlite_file(uri):
        command += ["--default-artifact-root", (database.parent / ARTIFACTS).as_uri()]
    # one process that serves pages: MLflow's job runners are for evaluating language-model applications
    environment = {**os.environ, **NO_TELEMETRY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment |= {"MLFLOW_BACKEND_STORE_URI": uri}  # a command line is public, and the URI may have a password
    environment |= {"MLFLOW_LOGGING_LEVEL": "WARNING", "UVICORN_LOG_LEVEL": "warning"}
    return group.start(command, environment, output="file")


def _wait_until_it_answers(address: str, server: Process, received: list[int]) -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and not received:
        if server.code is not None:
            raise FailedError(f"the MLflow server ended with exit code {server.code} before it answered")
        if answers(address):
            return
        print(".", end="", flush=True)
        time.sleep(0.5)
    if not received:
        raise FailedError(f"the MLflow server did not answer within {_SECONDS_TO_START:.0f} s")
