"""What a run file asks for: corpora, a batch for these ranks, and MLflow."""

import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import requests

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, masked
from launch.tools.doctor.checks import Finding, Settings
from launch.tools.doctor.machine import existing
from pretrain.config import RunConfig
from pretrain.tracking.mlflow_store import sqlite_file
from pretrain.trainer.preflight import preflight

_SECONDS_TO_ANSWER = 10.0
_LATER = "the run trains on; feed MLflow afterwards with pretrain sync"


def run_file(settings: Settings) -> list[Finding]:
    """Whether the run file is valid for these ranks, and its corpora are there."""
    path, *overrides = settings.run_file
    try:
        config = load(Path(path), overrides, RunConfig)
        setup = preflight(config, settings.all_ranks, here=False, folder=Path(path).parent)
    except UserError as error:
        return [Finding("run file", "fault", line) for line in str(error).splitlines()]
    found = f"{path} and its corpora are valid for {counted(settings.all_ranks, 'rank')}"
    return [Finding("run file", "ok", found), *(Finding("run file", "warning", line) for line in setup.warnings)]


def tracking(settings: Settings) -> list[Finding]:
    """Whether MLflow answers at the run's tracking URI. A run trains without it, so nothing here is a fault."""
    uri = settings.tracking
    if not settings.run_file:
        return []
    if uri is None:
        return [Finding("tracking", "ok", "MLflow is off (tracking.mlflow: null)")]
    shown, file = masked(uri), sqlite_file(uri)
    try:
        if file:
            with tempfile.TemporaryFile(dir=existing(file.parent)):  # SQLite writes beside its file too
                if file.exists() and not os.access(file, os.W_OK):
                    raise PermissionError(0, "can't be written")
            return [Finding("tracking", "ok", f"{file} can be written")]
        if not uri.startswith(("http://", "https://")):
            return [Finding("tracking", "ok", f"{shown}: not checked")]
        status = _status(uri)
    except (OSError, ValueError) as error:
        expected = "a file that can be written" if file else "a server that answers"
        return [Finding("tracking", "warning", f"{file or shown}: {_reason(error)}", expected, _LATER)]
    if status == 200:
        return [Finding("tracking", "ok", f"{shown} answers")]
    login = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; " if status in (401, 403) else ""
    return [Finding("tracking", "warning", f"{shown} answers {status}", "200", f"{login}{_LATER}")]


def _status(uri: str) -> int:
    """The status of the server's answer to MLflow's question for its experiments."""
    user, password, token = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN"))
    return requests.get(
        f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        auth=(user, password or "") if user and not token and not urlsplit(uri).username else None,
        timeout=_SECONDS_TO_ANSWER,
    ).status_code


def _reason(error: BaseException) -> str:
    """The reason of an error of the network or the disk: that of the error which it follows from."""
    while (origin := error.__cause__ or error.__context__) is not None:
        error = origin
    return "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
