"""MLflow's client, its store, a server or a sqlite file, and the names that it takes."""

import contextlib
import logging
import os
import re
from pathlib import Path

from data_pipeline.foundation.atomic import temporary_path
from data_pipeline.foundation.formatting import masked
from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():
    from mlflow import tracking  # 3.8 s and 170 MB, and many who need this module need no client

# retries are the feeder's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_KEY_LENGTH = 250  # MLflow's limit (mlflow/utils/validation.py)
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file
# MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash: losses come
# first, then evaluations, and seconds and sizes last. The first pattern that fits a name of metrics.jsonl counts.
_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/(.+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]


def client(uri: str) -> "tracking.MlflowClient":
    """An MLflow client."""
    kind = tracking.MlflowClient  # imports MLflow, which sets the level of its logger
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return kind(tracking_uri=uri)


def create_tables(uri: str) -> None:
    """Creates the tables of a new sqlite file, in another file, which then gets the name.

    If a process is killed while MLflow creates them, MLflow would find some, and never create the rest.
    """
    database = sqlite_file(uri)
    if database is None or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    new = temporary_path(database)
    client(f"sqlite:///{new}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):  # of runs that start together, the first one's stays
        database.hardlink_to(new)
    new.unlink()


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


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks."""
    return masked((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
