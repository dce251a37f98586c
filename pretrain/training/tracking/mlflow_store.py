"""MLflow's store, a server or a sqlite file: its client, the names that it takes and a run as it has it.

Two files in a run's directory say what MLflow has; feeder.py lists them with the others.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import NonNegativeInt

from data_pipeline.base.atomic import temporary_path, write_json
from data_pipeline.base.errors import OF_DISKS, FailedError, UserError
from data_pipeline.base.formatting import MASK, counted, masked
from data_pipeline.base.json_file import read_valid_json

if TYPE_CHECKING:
    from mlflow import tracking

logger = logging.getLogger(__name__)
_PARENT = "parent_of_runs"  # the tag that tells a parent from a training run of the same name
HOST = "host"  # a tag
NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown
_CLIENT = {
    # retries are the feeder's own; MLflow's would hold a closing run for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password
}
KEY_LENGTH = 250  # MLflow's limits (mlflow/utils/validation.py)
_DATASET_LENGTH, _DIGEST_LENGTH = 500, 36
_NEVER_TAKEN = (400, 404, 501)  # HTTP's status of an answer that will be the same next time
_MOST_UNSENT = 5  # errors of one feed, after which it looks as if nothing can be sent
ARTIFACTS = "mlartifacts"  # the folder beside a sqlite file
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
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
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

    @property
    def in_mlflow(self) -> dict[str, str]:
        """Name and digest: MLflow keeps one input of each pair, and a corpus may be both trained and validated on."""
        name = f"{self.name} ({self.context})"
        return {
            "name": name if len(name) <= _DATASET_LENGTH else _apart(name, name, _DATASET_LENGTH),
            "digest": self.digest[:_DIGEST_LENGTH],
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
        artifacts: files to upload, by their paths in the run directory.
        parent: the name of the parent run in MLflow.
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
    parent: str | None = None
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


class DeletedError(FailedError):
    """A run, or its experiment, is deleted in MLflow, so that MLflow refuses whatever is sent."""


T = TypeVar("T")


@dataclass
class MlflowRun:
    """A run, MLflow's client, and the part of the run that MLflow has.

    Attributes:
        parent: the id of the parent run.
        aside: the parts that MLflow refuses, by name, with the version of a file. They are sent again when the run ends
            or is opened again.
        unsent: the parts that the current feed could not send, for a reason that may pass.
    """

    client: "tracking.MlflowClient"
    directory: Path
    description: TrackedRun
    state: FeedState
    parent: str | None
    described: bool = False
    aside: dict[str, list[int] | None] = field(default_factory=dict)
    unsent: list[tuple[str, Exception]] = field(default_factory=list)
    _refusals: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Writes mlflow.json. If the disk refuses it, what was sent may be sent again, which is harmless."""
        try:
            self.state.save(self.directory)
        except OSError as error:
            self.unsent.append((self.state.file, error))

    @contextlib.contextmanager
    def part(self, name: str, version: list[int] | None = None) -> Iterator[None]:
        """Encloses the sending of one part of a run. If sending fails, the other parts are still sent.

        Raises DeletedError, and the errors of an MLflow that doesn't answer in time or can't write now.
        """
        try:
            yield
        except DeletedError:
            raise
        except Exception as error:
            if _refused(error):
                self.set_aside(name, one_line(error), version)
            elif _late(error):
                raise
            else:
                self.unsent.append((name, error))

    def send(self, what: str, items: Sequence[T], call: Callable[[Sequence[T]], object]) -> int:
        """Sends `items` by `call`, without those that MLflow refuses. Returns how many it has taken."""
        if not items:
            return 0
        try:
            call(items)
        except Exception as error:
            if not _refused(error):
                raise
            if len(items) == 1:
                self.set_aside(f"{what} {getattr(items[0], 'key', items[0])}", one_line(error))
                return 0
            middle = len(items) // 2
            return self.send(what, items[:middle], call) + self.send(what, items[middle:], call)
        return len(items)

    def set_aside(self, name: str, reason: str, version: list[int] | None = None) -> None:
        """Notes that MLflow refuses `name`. Raises DeletedError if that is because the run is deleted."""
        from mlflow import exceptions  # 3.8 s and 170 MB, and many who need this module need no client

        try:
            stage = self.client.get_run(self.state.run_id).info.lifecycle_stage
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stage = "deleted"
        if stage != "active":
            raise DeletedError(f"the run {self.state.run_id} is deleted there")
        if name not in self.aside:
            self._refusals.append(f"{name}: {reason}")
        self.aside[name] = version

    @property
    def failing(self) -> bool:
        """True if so many parts could not be sent that the remaining files wait for the next feed."""
        return len(self.unsent) >= _MOST_UNSENT

    def report(self) -> None:
        """Warns, in one line, of the parts that were set aside since the last call."""
        if self._refusals:
            others = f", and {counted(len(self._refusals) - 1, 'other')}" if len(self._refusals) > 1 else ""
            logger.warning(
                "MLflow at %s doesn't take %s%s; the rest is there", self.state.tracking_uri, self._refusals[0], others
            )
            self._refusals.clear()


def _refused(error: BaseException) -> bool:
    """True if the same request would fail again."""
    import requests  # it and MLflow take 4 s and 170 MB, and many who need this module need no client
    from mlflow import exceptions

    if isinstance(error, exceptions.MlflowException):
        # a value that the database of MLflow's own store can't hold
        unfit = isinstance(error.__cause__ or error.__context__, ValueError | OverflowError)
        return error.get_http_status_code() in _NEVER_TAKEN or unfit
    if isinstance(error, requests.RequestException):
        status = error.response.status_code if error.response is not None else 0
        return 400 <= status < 500 and status not in (401, 403, 408, 429)
    return not (isinstance(error, OSError) and error.errno in OF_DISKS)


def _late(error: BaseException) -> bool:
    """True if MLflow doesn't answer in time, so that the next request would wait in vain, too."""
    import requests  # 0.1 s, for a client alone

    code = getattr(error, "error_code", None)
    return code == "TEMPORARILY_UNAVAILABLE" or isinstance(error.__cause__, requests.Timeout)


def file_version(file: Path) -> list[int]:
    """[mtime_ns, bytes], by which a changed file is recognised. Raises FileNotFoundError."""
    stat = file.stat()
    return [stat.st_mtime_ns, stat.st_size]


def parent_run(client: "tracking.MlflowClient", experiment_id: str, name: str) -> str:
    """The id of the parent run `name`, which is created, and ended at once, if it doesn't exist.

    Runs that start together may each create one. All of them then take the oldest, and the others are deleted.
    """
    tag = safe_key(name)  # so that a filter can hold it
    found = _parents(client, experiment_id, tag)
    if not found:
        created = client.create_run(experiment_id, tags={_PARENT: tag}, run_name=name[:KEY_LENGTH]).info.run_id
        client.set_terminated(created)
        found = _parents(client, experiment_id, tag)
        if found[0].info.run_id != created:
            client.delete_run(created)
    return found[0].info.run_id


def _parents(client: "tracking.MlflowClient", experiment_id: str, tag: str) -> list[Any]:
    """The parent runs with the value `tag`, the oldest first."""
    runs = client.search_runs([experiment_id], f"tags.{_PARENT} = '{tag}'")
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


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
    return key if key == name and 0 < len(key) <= length else _apart(key, name, length)


def _apart(shown: str, name: str, length: int) -> str:
    """`shown`, cut to `length` with digits that tell `name` from others."""
    digits = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{shown[: length - 9]}-{digits}"


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
