"""A real MLflow server."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


class Server:
    """Serves the sqlite file mlflow.db in `folder`, and artifacts beside it, at `uri`. It answers once it is made."""

    def __init__(self, folder: Path, port: int):
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        command += ["--artifacts-destination", str(folder / "mlartifacts")]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (folder / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
            )
        self.uri = f"http://127.0.0.1:{port}"
        while True:
            assert self._process.poll() is None, (folder / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)

    def kill(self) -> None:
        """Ends it at once, as a crash does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
