"""Whether MLflow answers at the run's tracking URI. A run trains without it, so nothing here is a fault."""

import contextlib
import http.client
import os
import socket
import ssl
import tempfile
from base64 import b64encode
from pathlib import Path
from urllib.parse import unquote, urlsplit

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.secrets import masked
from launch.tools.doctor.directory import existing
from launch.tools.doctor.findings import Finding
from pretrain.tracking.store import sqlite_file

_PORTS = {"http": 80, "https": 443, "mysql": 3306, "postgresql": 5432, "mssql": 1433}
_SECONDS = 10.0
_LATER = "the run trains on; feed MLflow afterwards with pretrain sync"


def tracking(uri: str | None) -> list[Finding]:
    if uri is None:
        return [Finding("tracking", "ok", "MLflow is off (tracking.mlflow: null)")]
    shown = masked(uri)
    if file := sqlite_file(uri):
        return [_of_file(file)]
    parts = urlsplit(uri)
    kind = parts.scheme.partition("+")[0]
    try:
        port = parts.port or _PORTS.get(kind)
    except ValueError as error:
        return [Finding("tracking", "warning", f"{shown}: {error}", "", _LATER)]
    if not parts.hostname or port is None:
        return [Finding("tracking", "ok", f"{shown}: not checked")]
    try:
        if kind in ("http", "https"):
            status = _status(kind, parts.hostname, port, parts.path, _login(parts.username, parts.password))
            if status in (401, 403):
                remedy = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; {_LATER}"
                return [Finding("tracking", "warning", f"{shown} refuses the login ({status})", "a login", remedy)]
            if status != 200:
                return [Finding("tracking", "warning", f"{shown} answers {status}", "200", _LATER)]
        else:
            socket.create_connection((parts.hostname, port), _SECONDS).close()
    except (OSError, http.client.HTTPException) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        return [Finding("tracking", "warning", f"{shown}: {reason}", "a server that answers", _LATER)]
    return [Finding("tracking", "ok", f"{shown} answers")]


def _of_file(file: Path) -> Finding:
    """MLflow's tables in a file; SQLite also writes beside it."""
    place = file if file.exists() else existing(file.parent)
    try:
        with tempfile.TemporaryFile(dir=existing(file.parent)):
            if not os.access(place, os.W_OK):
                raise UserError("can't be written")
    except (OSError, UserError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Finding("tracking", "warning", f"{place}: {reason}", "a file that can be written", _LATER)
    return Finding("tracking", "ok", f"{file} can be written")


def _login(user: str | None, password: str | None) -> dict[str, str]:
    user = unquote(user) if user else os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(password) if password else os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return {"Authorization": "Basic " + b64encode(f"{user}:{password or ''}".encode()).decode()} if user else {}


def _status(kind: str, host: str, port: int, path: str, login: dict[str, str]) -> int:
    """The status of MLflow's answer to the question for its experiments."""
    if kind == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", f"{path.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1", headers=login)
        return connection.getresponse().status
