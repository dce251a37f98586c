"""A real MLflow server, and a proxy before it that refuses some requests."""

import contextlib
import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass
class Proxy:
    """Stands before a server, at `uri`. It answers `status` to each request whose method and path fit a pattern."""

    uri: str
    refused: str
    status: int


@contextlib.contextmanager
def refusing(server: str, requests: str, status: int) -> Iterator[Proxy]:
    """A proxy before `server` that refuses `requests` at first."""
    proxy = Proxy("", requests, status)

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
            if re.search(proxy.refused, f"{self.command} {self.path}"):
                code, content = proxy.status, b"no"
            else:
                kind = {"Content-Type": self.headers.get("Content-Type", "application/json")}
                request = urllib.request.Request(server + self.path, body, kind, method=self.command)
                try:
                    with urllib.request.urlopen(request) as answer:
                        code, content = answer.status, answer.read()
                except urllib.error.HTTPError as answer:
                    code, content = answer.code, answer.read()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        proxy.uri = f"http://127.0.0.1:{serving.server_port}"
        yield proxy
        serving.shutdown()
        thread.join()
