"""`pretrain dashboard`: MLflow's own UI, opened on the charts of a run."""

import os
from pathlib import Path

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import without_login
from data_pipeline.base.processes import PYTHON, SAFE_PATH
from pretrain.config.run_config import MLFLOW_FILE
from pretrain.training.tracking.mlflow_store import FeedState, absolute_uri, sqlite_file, with_password


def dashboard(run_dir: Path | None, uri: str | None, port: int = 5000) -> None:
    """Prints an address of MLflow's UI, and replaces this process by MLflow's server, which serves until Ctrl-C.

    With `run_dir`, the address shows the charts of this run, else the list of experiments. `uri`: None: the run's
    MLflow, else `sqlite:///runs/mlflow.db`. If MLflow already runs as a server, the address is only printed. Raises
    UserError if there is nothing to show.
    """
    state = FeedState.load(run_dir) if run_dir else None
    if run_dir and state is None:
        raise UserError(
            f"{run_dir}: no {FeedState.file} here, so MLflow has no data of this run; next: pretrain sync {run_dir}"
        )
    uri = with_password(uri or (state.tracking_uri if state else MLFLOW_FILE))
    page = f"#/experiments/{state.experiment_id}/runs/{state.run_id}/model-metrics" if state else "#/experiments"
    page += "?workflowType=machine_learning"  # without this, the UI shows a run as one of a chat application
    if uri.startswith(("http://", "https://")):
        print(f"{without_login(uri).rstrip('/')}/{page}")
        return
    if (database := sqlite_file(uri)) and not database.exists():
        other = f"to send the run to another one: pretrain sync {run_dir} --uri {MLFLOW_FILE}"
        raise UserError(f"{database}: no such file; {other if run_dir else 'runs create it when they train'}")
    print(f"http://127.0.0.1:{port}/{page}\nMLflow starts, which takes some seconds. Ctrl-C ends it.", flush=True)
    command = [*PYTHON, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    # without MLflow's job runners, which evaluate language-model applications
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    # a command line is public, and the URI may have a password
    environment |= {**SAFE_PATH, "MLFLOW_BACKEND_STORE_URI": absolute_uri(uri)}
    os.execve(command[0], command, environment)
