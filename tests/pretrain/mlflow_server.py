"""A real MLflow server."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


class Server:
    """Serves the sqlite file mlflow.db in `folder`, and artifacts beside it, at `uri`. It answers once it is made.

    It is the process that `mlflow server` would start, after seconds of imports of its own.
    """

    def __init__(self, folder: Path, port: int):
        command = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port)]
        command.append("mlflow.server.fastapi_app:app")
        store = f"sqlite:///{folder}/mlflow.db"
        settings = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "_MLFLOW_SERVER_FILE_STORE": store,
            "_MLFLOW_SERVER_REGISTRY_STORE": store,
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "mlartifacts"),
        }
        with (folder / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
            )
        self.uri = f"http://127.0.0.1:{port}"
        while not answers(self.uri):
            assert self._process.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends it at once, as a crash does."""
        with contextlib.suppress(ProcessLookupError):  # it has been killed before
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=120):
            return True
    except OSError:
        return False
