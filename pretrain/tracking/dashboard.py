"""Serves the MLflow UI on this machine and opens it at the charts of a run."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import MASK, masked, without_login
from pretrain.tracking.moved import follow
from pretrain.tracking.state import STATE_FILE, FeedState
from pretrain.tracking.store import ARTIFACTS, NO_TELEMETRY, absolute_uri, creating_alone, sqlite_file

_HOST = "127.0.0.1"
_TRAINING = "?workflowType=machine_learning"  # otherwise the UI shows a run as the evaluation of a chat application
_SECONDS_TO_START = 120.0
_SECONDS_TO_STOP = 10.0


def dashboard(run_dir: Path | None, uri: str, port: int = 5000, open_browser: bool = True) -> None:
    """Serves the MLflow UI until Ctrl-C or SIGTERM and prints its address.

    With `run_dir` it opens the charts of that run in the run's own MLflow, and ignores `uri`, unless that has the
    password which the run has not recorded; otherwise it opens the list of experiments. If MLflow already runs as a
    server, it only prints the address. Raises UserError if there is nothing to show.
    """
    state = _state_of(run_dir) if run_dir else None
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
    with suppress(OSError, sqlite3.Error), creating_alone(uri):
        if database:
            follow(database)
    with _server(uri, free) as server:
        print("starting the MLflow UI ", end="", flush=True)
        _wait_until_it_answers(address, server)
        print(" ready, Ctrl-C ends it", flush=True)
        _show(f"{address}/{page}", open_browser)
        if state:
            print(f"with the experiment's other runs: {address}/{runs}{_TRAINING}&compareRunsMode=CHART", flush=True)
        server.wait()
        raise FailedError(f"the MLflow server stopped unexpectedly, with exit code {server.returncode}")


def _state_of(run_dir: Path) -> FeedState:
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


@contextmanager
def _server(uri: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts the server. However the block ends, also by SIGTERM, the server ends with all its children."""
    command = [sys.executable, "-m", "mlflow", "server"]
    command += ["--host", _HOST, "--port", str(port), "--workers", "1"]
    if database := sqlite_file(uri):
        command += ["--default-artifact-root", (database.parent / ARTIFACTS).as_uri()]
    # one process that serves pages: MLflow's job runners are for evaluating language-model applications
    environment = {**os.environ, **NO_TELEMETRY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment |= {"MLFLOW_BACKEND_STORE_URI": uri}  # a command line is public, and the URI may have a password
    environment |= {"MLFLOW_LOGGING_LEVEL": "WARNING", "UVICORN_LOG_LEVEL": "warning"}

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryFile() as output:
        # a session of its own: Ctrl-C reaches only this process, which then ends the server
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield server
        except KeyboardInterrupt:
            print("\nended", flush=True)
        except FailedError:
            output.seek(0)
            print("\n" + output.read().decode(errors="replace")[-4000:], file=sys.stderr, flush=True)
            raise
        finally:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave the server behind
            _end(server)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _end(server: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(_SECONDS_TO_STOP)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _wait_until_it_answers(address: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise FailedError(f"the MLflow server ended with exit code {server.returncode} before it answered")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            print(".", end="", flush=True)
            time.sleep(0.5)
    raise FailedError(f"the MLflow server did not answer within {_SECONDS_TO_START:.0f} s")
