"""MLflow's client and its store: a server, or a sqlite file."""

import contextlib
import http.client
import logging
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.foundation.atomic import hidden, reveal
from data_pipeline.foundation.locks import lock
from data_pipeline.foundation.secrets import masked

# MLflow would report its use to its developers, from the client and from the server
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# retries are the feeder's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

# MLflow's limits (mlflow/utils/validation.py)
METRICS_PER_BATCH, PARAMETERS_PER_BATCH = 1000, 100
PARAMETER_LENGTH, TAG_LENGTH, DIGEST_LENGTH = 6000, 8000, 36
_KEY_LENGTH = 250
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file


def client(uri: str) -> Any:
    """An MLflow client. Importing MLflow takes a second, so it isn't imported with this module."""
    os.environ.update(NO_TELEMETRY)
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def creating_alone(uri: str) -> Iterator[None]:
    """Before the block, creates the tables of a new sqlite file; within it, no other process does.

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
        if not database.exists():
            _create_tables(database)
        yield


def _create_tables(database: Path) -> None:
    for leftover in database.parent.glob(f"{hidden(database, '*').name}*"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    new = hidden(database)
    client(f"sqlite:///{new}").search_experiments(max_results=1)
    if not database.exists():  # there are file systems without locks
        reveal(new, database)


def absolute_uri(uri: str) -> str:
    """`uri`; the path of a sqlite file becomes absolute, so that it doesn't depend on the working directory."""
    file = sqlite_file(uri)
    return f"sqlite:///{file}" if file else uri


def sqlite_file(uri: str) -> Path | None:
    """The file of `sqlite:///relative` or `sqlite:////absolute`; None for any other uri."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def safe_key(name: str) -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_KEY_LENGTH].rstrip("/") or "_"


def answers(uri: str) -> bool:
    """Whether the MLflow server at `uri` answers within a second; False for what is no server."""
    if not uri.startswith(("http://", "https://")):
        return False
    parts = urllib.parse.urlsplit(uri)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path.rstrip('/')}/health").geturl()
    try:
        with urllib.request.urlopen(address, timeout=1.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # a proxy that wants a password answers; one without a server behind it doesn't
    except (OSError, http.client.HTTPException, ValueError):
        return False


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks."""
    return masked((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
