"""MLflow's client and its store: a server, or a sqlite file, which may have been moved."""

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from data_pipeline.foundation.atomic import commit, temporary_path
from data_pipeline.foundation.locks import lock
from data_pipeline.foundation.secrets import masked, without_login

# MLflow would report its use to its developers, from the client and from the server
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# retries are the feeder's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

# MLflow's limits (mlflow/utils/validation.py)
METRICS_PER_BATCH, PARAMETERS_PER_BATCH = 1000, 100
PARAMETER_LENGTH, TAG_LENGTH, DIGEST_LENGTH = 6000, 8000, 36
_KEY_LENGTH = 250
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file

_LOCATIONS = [
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
]
_SECONDS_LOCKED = 30.0  # that another process may keep the database locked


def client(uri: str) -> Any:
    """An MLflow client. Importing MLflow takes a second, so it isn't imported with this module."""
    os.environ.update(NO_TELEMETRY)
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient  # takes a second

    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Before the block, creates the tables of a new sqlite file, and sets right those of a file that was moved; within
    it, no other process does.

    If runs that start together did so at the same time, or if one was killed meanwhile, MLflow would find half of the
    tables, which it never completes. So they are made in another file, which then gets the name.
    """
    database = sqlite_file(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f".{database.name}.lock").open("w") as file:
        lock(
            file,
            f"{database}: runs that start together may fail to create its tables; MLflow is then tried again",
            wait=True,
        )
        if database.exists():
            relocate_artifacts(database)
        else:
            _create_tables(database)
        yield


def _create_tables(database: Path) -> None:
    for leftover in database.parent.glob(f"{temporary_path(database, '*').name}*"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    new = temporary_path(database)
    client(f"sqlite:///{new}").search_experiments(max_results=1)
    if not database.exists():  # there are file systems without locks
        commit(new, database)


def absolute_uri(uri: str) -> str:
    """`uri`; the path of a sqlite file becomes absolute, so that it doesn't depend on the working directory."""
    file = sqlite_file(uri)
    return f"sqlite:///{file}" if file else uri


def sqlite_file(uri: str) -> Path | None:
    """The file of `sqlite:///relative` or `sqlite:////absolute`; None for any other uri."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def uri_now(uri: str, run_dir: Path) -> str:
    """`uri`; if its sqlite file is gone, that of the nearest file of this name in a folder above `run_dir`."""
    file = sqlite_file(uri)
    if file is None or file.exists():
        return uri
    above = (parent / file.name for parent in run_dir.absolute().parents)
    return next((f"sqlite:///{found}" for found in above if found.is_file()), uri)


def relocate_artifacts(database: Path) -> None:
    """Makes the artifacts' locations in `database` those beside it, if its artifacts are there.

    MLflow keeps absolute URIs, even where it is given relative ones, so a folder of runs that was moved or copied with
    its sqlite file has the old ones.
    """
    folder = database.parent / ARTIFACTS
    if not folder.is_dir():
        return
    now = f"{folder.as_uri()}/"
    with contextlib.closing(sqlite3.connect(database, timeout=_SECONDS_LOCKED)) as connection, connection:
        found = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        for (location,) in found:
            before, beside, _ = (location or "").rpartition(f"/{ARTIFACTS}/")
            old = before + beside
            if beside and old != now and old.startswith("file://"):
                for table, column in _LOCATIONS:
                    moved = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                    connection.execute(moved, (now, len(old) + 1, len(old), old))


def safe_key(name: str) -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_KEY_LENGTH].rstrip("/") or "_"


def answers(uri: str) -> bool:
    """Whether the MLflow server at `uri` answers within a second; False for what is no server."""
    if not uri.startswith(("http://", "https://")):
        return False
    try:  # a proxy that wants a password answers; one without a server behind it doesn't
        return requests.get(f"{without_login(uri).rstrip('/')}/health", timeout=1.0).status_code < 500
    except requests.RequestException:
        return False


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks."""
    return masked((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
