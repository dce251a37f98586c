"""MLflow's store, a server or a sqlite file: its client, its URIs, and what a run's directory says of it. Nothing here
imports MLflow before `client` is called."""

import contextlib
import logging
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import NonNegativeInt

from data_pipeline.base.atomic import temporary_path, write_json
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import MASK, masked
from data_pipeline.base.json_file import read_valid_json

if TYPE_CHECKING:
    from mlflow import tracking

NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown
_CLIENT = {
    # retries are the feeder's own; MLflow's would hold a closing run for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password
}


class Kept:
    """The content of a JSON file of the run directory."""

    file: ClassVar[str]

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / self.file, self)

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        return read_valid_json(run_dir / cls.file, cls)


@dataclass
class TrackedRun(Kept):
    """The description of a run for MLflow.

    Attributes:
        parameters: the resolved run file.
        tags: further facts about the run.
        key: a tag by which the run is found in MLflow.
        directory: the absolute run directory; "" in files of earlier versions.
    """

    file = "tracking.json"

    experiment: str
    run_name: str
    attempt: int
    uri: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    directory: str = ""


@dataclass
class FeedState(Kept):
    """The part of a run that MLflow has.

    Attributes:
        offset: bytes sent of metrics.jsonl.
        files: [mtime_ns, bytes] of each uploaded file, by its path in the run directory.
    """

    file = "mlflow.json"

    tracking_uri: str
    experiment_id: str
    run_id: str
    offset: NonNegativeInt = 0
    files: dict[str, list[int]] = field(default_factory=dict)


def client(uri: str) -> "tracking.MlflowClient":
    """An MLflow client."""
    from mlflow import tracking  # 3.8 s and 170 MB, and many who need this module need no client

    kind = tracking.MlflowClient  # imports MLflow, which sets the level of its logger
    for name, value in _CLIENT.items():
        os.environ.setdefault(name, value)
    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return kind(tracking_uri=uri)


def create_tables(uri: str) -> None:
    """Creates the tables of a new sqlite file, in another file, which then gets the name.

    MLflow fails where two processes create them, and forever after a kill in between.
    """
    database = sqlite_file(uri)
    if database is None or database.exists():
        return
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


def with_password(uri: str) -> str:
    """`uri`. Raises UserError if it is a recorded URI, which has *** in place of its password."""
    if MASK in uri:
        raise UserError(f"the password of {uri} isn't recorded; give --uri with it")
    return uri


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks. If an address doesn't
    answer, the cause at the end of the message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    _, marked, cause = line.rpartition("(Caused by ")
    return masked((cause.removesuffix(")") if marked else line)[:300])
