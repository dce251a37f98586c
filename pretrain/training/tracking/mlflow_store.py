"""MLflow's store, a server or a sqlite file: its client, the names that it takes, and what a run's directory says
of it. Nothing here imports MLflow before `client` is called."""

import contextlib
import hashlib
import logging
import os
import re
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

HOST = "host"  # a tag
NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file
KEY_LENGTH = 250  # MLflow's limit (mlflow/utils/validation.py)
_CLIENT = {
    # retries are the feeder's own; MLflow's would hold a closing run for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password
}
# MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash: losses come
# first, then evaluations, and seconds and sizes last. The first pattern that fits a name of metrics.jsonl counts. No
# two names become one.
_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(?!.+\.(?:\w+_loss|unigram_entropy)/loss$)(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/([^/]+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"(train/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]


@dataclass(frozen=True)
class DatasetInfo:
    """A corpus as MLflow shows it.

    `digest` is the manifest's fingerprint, `context` is train or validation, and `profile` has further facts (rows,
    tokens).
    """

    name: str
    digest: str
    source: str
    context: str
    profile: dict[str, Any] = field(default_factory=dict)


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
        artifacts: files to upload, by their paths in the run directory.
        key: a tag by which the run is found in MLflow if mlflow.json is lost.
    """

    file = "tracking.json"

    experiment: str
    run_name: str
    attempt: int
    uri: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[DatasetInfo] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class FeedState(Kept):
    """The part of a run that MLflow has.

    Attributes:
        offsets: bytes sent of each file of metrics, by its path in the run directory.
        files: [mtime_ns, bytes] of each uploaded file.
    """

    file = "mlflow.json"

    tracking_uri: str
    experiment_id: str
    run_id: str
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)
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


def with_password(recorded: str, given: str | None = None) -> str:
    """`recorded`, a URI without its password, or `given`, the same with it. Raises UserError if there is only ***."""
    if MASK not in recorded:
        return recorded
    if given is None or masked(given) != recorded:
        raise UserError(f"the password of {recorded} isn't recorded; give --uri with it")
    return given


def sqlite_file(uri: str) -> Path | None:
    """The file of `sqlite:///relative` or `sqlite:////absolute`; None for any other uri."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)).absolute() if uri.startswith(prefix) else None


def safe_key(name: str, length: int = KEY_LENGTH, refused: str = r"[^/\w.\- :]") -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length.

    A changed name ends with eight digits of the SHA-256 of `name`, so that two names stay two.

    >>> safe_key("loss [en]")
    'loss _en_-ca825f80'
    """
    parts = re.sub(refused, "_", name).split("/")
    key = "/".join(part for part in parts if part not in ("", ".", ".."))
    if key == name and 0 < len(key) <= length:
        return key
    digits = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{key[: length - 9]}-{digits}"


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)


def one_line(error: Exception) -> str:
    """The first line of the message: MLflow's messages continue with SQL statements and stacks. If an address doesn't
    answer, the cause at the end of the message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    _, marked, cause = line.rpartition("(Caused by ")
    return masked((cause.removesuffix(")") if marked else line)[:300])
