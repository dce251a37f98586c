"""`pretrain dashboard`: MLflow's own UI, opened on the charts of a run."""

import os
import socket
from pathlib import Path

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import without_login
from data_pipeline.base.processes import PYTHON, SAFE_PATH
from pretrain.training.tracking.mlflow_store import ARTIFACTS, FeedState, absolute_uri, sqlite_file, with_password

_HOST = "127.0.0.1"
_TRAINING = "?workflowType=machine_learning"  # without this, the UI shows a run as the evaluation of a chat application


def dashboard(run_dir: Path | None, given: str, port: int = 5000) -> None:
    """Prints an address of MLflow's UI, and replaces this process by MLflow's server, which serves until Ctrl-C.

    With `run_dir`, the address shows the charts of this run in the run's own MLflow; the URI `given` may add the
    password. Otherwise it shows the list of experiments. If MLflow already runs as a server, the address is only
    printed. Raises UserError if there is nothing to show.
    """
    state = FeedState.load(run_dir) if run_dir else None
    if run_dir and state is None:
        raise UserError(
            f"{run_dir}: no {FeedState.file} here, so MLflow has no data of this run; next: pretrain sync {run_dir}"
        )
    uri = state.tracking_uri if state else absolute_uri(given)
    runs = f"#/experiments/{state.experiment_id}/runs" if state else "#/experiments"
    page = (f"{runs}/{state.run_id}/model-metrics" if state else runs) + _TRAINING
    if uri.startswith(("http://", "https://")):
        print(f"{without_login(uri).rstrip('/')}/{page}")
        return
    uri = with_password(uri, given)
    database = sqlite_file(uri)
    if database and not database.exists():
        other = f"to send the run to another one: pretrain sync {run_dir} --uri sqlite:///runs/mlflow.db"
        raise UserError(f"{database}: no such file; {other if run_dir else 'runs create it when they train'}")
    address = f"http://{_HOST}:{(port := _free_port(port))}"
    print(f"{address}/{page}")
    if state:
        print(f"with the experiment's other runs: {address}/{runs}{_TRAINING}&compareRunsMode=CHART")
    print("MLflow starts, which takes some seconds. Ctrl-C ends it.", flush=True)
    command = [*PYTHON, "-m", "mlflow", "server", "--host", _HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    if database:
        command += ["--default-artifact-root", (database.parent / ARTIFACTS).as_uri()]
    # without MLflow's job runners, which evaluate language-model applications
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    # a command line is public, and the URI may have a password
    environment |= {**SAFE_PATH, "MLFLOW_BACKEND_STORE_URI": uri}
    os.execve(command[0], command, environment)


def _free_port(port: int) -> int:
    """`port`, or a free port if something listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT counts as free
        try:
            probe.bind((_HOST, port))
        except OSError:
            probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
