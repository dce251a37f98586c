"""Tracks a run in a local file of metrics, and feeds MLflow from this file in a thread.

Training only waits until a line is appended to RUN/metrics.jsonl. A daemon thread sends the file to MLflow. While
MLflow is slow, locked or unreachable, its UI lacks curves, but training is unaffected. Only rank 0 has a tracker.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import NonNegativeInt

from data_pipeline.base.atomic import temporary_path, write_json
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import MASK, masked, masked_values
from data_pipeline.base.json_file import read_valid_json
from data_pipeline.base.processes import PYTHON
from pretrain.run.metrics_file import MetricLog

if TYPE_CHECKING:
    from mlflow import tracking

NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown
_CLIENT = {
    # retries are the feeder's own; MLflow's would hold a closing run for minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with its password
}
Status = Literal["FINISHED", "FAILED", "KILLED"]

SECONDS_BEFORE_FEEDS = 2.0  # importing MLflow's client takes seconds of the processor, which the first step needs
SECONDS_BETWEEN_FEEDS = 2.0
SECONDS_FOR_THE_REST = 30.0  # limit of the last feed
LONGEST_PAUSE = 120.0
logger = logging.getLogger(__name__)


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


class Tracker:
    """Logs a run's metrics and feeds them to MLflow, unless `uri` is None.

    Files that appear in RUN/artifacts later, whole under their final names, are uploaded too. Nothing here raises or
    waits because of MLflow. Passwords in URLs are recorded as ***.

    Attributes:
        connects: True while MLflow's client is imported and feeds for the first time, which takes processor time.

    >>> with Tracker(run_dir, TrackedRun("c4", "t5", attempt=1), "sqlite:///runs/mlflow.db") as tracker:
    ...     tracker.log(10, {"train/loss": 9.8})
    """

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str | None):
        self.run_dir = run_dir
        self._log, self._log_failing = MetricLog(run_dir, run.attempt), False
        self._run = replace(
            run,
            uri=masked(absolute_uri(uri)) if uri else None,
            parameters=masked_values(run.parameters),
            tags=masked_values(run.tags),
        )
        if before := TrackedRun.load(run_dir):
            self._run.key, self._run.started = before.key, before.started
        self._run.save(run_dir)
        self._closing, self._complete = threading.Event(), not uri
        self.connects = bool(uri)
        self._feeding = threading.Thread(target=self._feed, args=(uri,), name="mlflow-feeder", daemon=True)
        if uri:
            self._feeding.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row to the file of metrics. If the disk refuses the row, warns once and writes the row later."""
        try:
            self._log.log(step, metrics)
            self._log_failing = False
        except OSError as error:
            if not self._log_failing:
                logger.warning("%s: %s; metrics are kept in memory until it can be written", self._log.path, error)
            self._log_failing = True

    def close(self, status: Status) -> None:
        """Ends the run. The last feed may take 30 seconds. May be called twice."""
        if self._run.ended is not None:
            return
        self._run.status, self._run.ended = status, time.time()
        try:
            self._log.flush()
            self._run.save(self.run_dir)
        except OSError as error:
            logger.warning("%s: %s", self.run_dir, error)
        self._log.close()
        self._closing.set()
        if not self._complete:
            self._feeding.join(SECONDS_FOR_THE_REST)
        if not self._complete:
            logger.warning("MLflow lacks the end of this run; to feed it later: pretrain sync %s", self.run_dir)

    def _feed(self, uri: str) -> None:
        """Feeds MLflow every few seconds, less and less often while it fails, and once more when the run has ended."""
        feeder, failing, pause = None, False, SECONDS_BETWEEN_FEEDS
        closing = self._closing.wait(SECONDS_BEFORE_FEEDS)
        while True:
            try:
                from pretrain.training.tracking.feeder import Feeder  # MLflow: 4 s, 175 MB, maybe not importable

                feeder = feeder or Feeder(self.run_dir, self._run, uri)
                feeder.feed()
                self._complete = closing
                if failing:
                    logger.warning("MLflow at %s accepts metrics again", masked(uri))
                failing, pause = False, SECONDS_BETWEEN_FEEDS
            except Exception as error:
                feeder = None  # the run may be deleted there; the next try makes another one
                if not failing:
                    address, reason = masked(uri), one_line(error)
                    logger.warning("MLflow at %s: %s; training continues, will try again", address, reason)
                failing, pause = True, min(2 * pause, LONGEST_PAUSE)
            self.connects = False
            if closing:
                return
            closing = self._closing.wait(pause)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Closes as finished, as failed after an exception, as killed after Ctrl-C or a call of exit."""
        self.close("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")


def record_end(run_dir: Path, ended: float | None = None, status: Status = "FAILED") -> bool:
    """Records for MLflow that a run has ended, now or when it `ended`, if the run didn't record its own end. Returns
    True if MLflow must be fed with this. Raises OSError if the disk refuses."""
    run = TrackedRun.load(run_dir)
    if run is None or run.ended is not None:
        return False
    replace(run, status=status, ended=ended or time.time()).save(run_dir)
    return run.uri is not None


def sync_apart(run_dir: Path) -> None:
    """Runs `sync` in another process, since MLflow's client takes much memory. Prints a line if it fails or takes too
    long."""
    command = [*PYTHON, "-m", "pretrain", "sync", str(run_dir)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        if not subprocess.run(command, capture_output=True, timeout=SECONDS_FOR_THE_REST).returncode:
            return
    print(f"MLflow lacks the end of this run; to feed it later: pretrain sync {run_dir}", file=sys.stderr)


def sync(run_dir: Path, uri: str | None = None) -> int:
    """Sends everything of `run_dir` that MLflow lacks; returns the number of metrics sent.

    `uri` names another MLflow than the run's own, for instance a server that the training machine can't reach. Raises
    UserError for a directory without a run, FailedError if MLflow can't be fed.
    """
    from pretrain.training.tracking.feeder import Feeder  # MLflow takes 4 s and 175 MB: in a thread of a run

    run = TrackedRun.load(run_dir)
    if run is None:
        raise UserError(f"{run_dir}: no tracking.json here; give the directory of a run that has been started")
    if not (uri := uri or run.uri):
        raise UserError(f"{run_dir}: the run was started without tracking.mlflow.uri; give one to sync to")
    uri = with_password(uri)
    try:
        return Feeder(run_dir, run, uri).feed()
    except Exception as error:
        raise FailedError(f"{masked(uri)}: {one_line(error)}; what was sent is kept, sync again to continue") from error
