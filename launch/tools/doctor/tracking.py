"""Whether MLflow answers at the run's tracking URI. A run trains without it, so nothing here is a fault."""

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import requests

from data_pipeline.foundation.secrets import masked
from launch.tools.doctor.directory import existing
from launch.tools.doctor.findings import Finding, Settings
from pretrain.tracking.store import sqlite_file

_PORTS = {"http": 80, "https": 443, "mysql": 3306, "postgresql": 5432, "mssql": 1433}
_SECONDS = 10.0
_LATER = "the run trains on; feed MLflow afterwards with pretrain sync"


def check(settings: Settings) -> list[Finding]:
    uri = settings.tracking
    if not settings.run_file:
        return []
    if uri is None:
        return [Finding("tracking", "ok", "MLflow is off (tracking.mlflow: null)")]
    if file := sqlite_file(uri):
        return [_check_file(file)]
    shown, parts = masked(uri), urlsplit(uri)
    kind = parts.scheme.partition("+")[0]
    try:
        port = parts.port or _PORTS.get(kind)
        if not parts.hostname or port is None:
            return [Finding("tracking", "ok", f"{shown}: not checked")]
        if kind not in ("http", "https"):
            socket.create_connection((parts.hostname, port), _SECONDS).close()
            return [Finding("tracking", "ok", f"{shown} answers")]
        status = _status(uri)
    except ValueError as error:  # a wrong port
        return [Finding("tracking", "warning", f"{shown}: {error}", "", _LATER)]
    except OSError as error:
        return [Finding("tracking", "warning", f"{shown}: {_reason(error)}", "a server that answers", _LATER)]
    if status in (401, 403):
        remedy = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; {_LATER}"
        return [Finding("tracking", "warning", f"{shown} refuses the login ({status})", "a login", remedy)]
    if status != 200:
        return [Finding("tracking", "warning", f"{shown} answers {status}", "200", _LATER)]
    return [Finding("tracking", "ok", f"{shown} answers")]


def _check_file(file: Path) -> Finding:
    """MLflow's tables in a file; SQLite also writes beside it."""
    path = file if file.exists() else existing(file.parent)
    try:
        with tempfile.TemporaryFile(dir=existing(file.parent)):
            reason = None if os.access(path, os.W_OK) else "can't be written"
    except OSError as error:
        reason = _reason(error)
    if reason:
        return Finding("tracking", "warning", f"{path}: {reason}", "a file that can be written", _LATER)
    return Finding("tracking", "ok", f"{file} can be written")


def _status(uri: str) -> int:
    """The status of the server's answer to MLflow's question for its experiments."""
    parts = urlsplit(uri)
    user = unquote(parts.username or "") or os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(parts.password or "") or os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    return requests.get(
        f"{address}/api/2.0/mlflow/experiments/search?max_results=1",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        auth=(user, password) if user and not token else None,
        timeout=_SECONDS,
    ).status_code


def _reason(error: BaseException) -> str:
    """The reason of an error of the network or the disk: that of the error which it follows from."""
    while (origin := error.__cause__ or error.__context__) is not None:
        error = origin
    return "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
