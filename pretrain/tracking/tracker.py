"""Tracks a run in a local log of metrics, from which MLflow is fed.

Training waits only for one line to be appended to RUN/metrics.jsonl. A daemon thread feeds MLflow from that file. While
MLflow is slow, locked or unreachable, its UI lacks curves, but training is unaffected. Only rank 0 has a tracker.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import MASK, masked, masked_values
from pretrain.run.metrics_file import MetricLog
from pretrain.tracking.feeder import MlflowFeeder
from pretrain.tracking.mlflow_run import ARTIFACTS_DIRECTORY, DatasetInfo, TrackedRun
from pretrain.tracking.store import absolute_uri, answers, one_line

Status = Literal["FINISHED", "FAILED", "KILLED"]

SECONDS_BEFORE_FEEDS = 2.0  # MLflow's client takes seconds of the processor, which the first step needs
SECONDS_BETWEEN_FEEDS = 2.0
MOST_SECONDS_TO_CONNECT = 30.0  # in which importing the client and the first feed take this rank's processor
SECONDS_FOR_THE_REST = 30.0  # at most, at the end of a run
SECONDS_FOR_A_RETURN = 3.0  # of an MLflow that is away when a run ends
LONGEST_PAUSE = 120.0
logger = logging.getLogger(__name__)


class Tracker:
    """Logs a run's metrics and feeds them to MLflow, unless `uri` is None.

    `parameters` is the resolved run config, `tags` what else names the run (git commit, ranks, zero_stage), `artifacts`
    files such as config.yaml, and `parent` the name of the run that MLflow shows it under. Files that appear in
    `artifacts_directory` later, whole under their final names, are uploaded too. Nothing here raises or waits because
    of MLflow. Passwords in URLs are recorded as ***.

    >>> with Tracker(run_dir, attempt=1, run_name="t5", uri="sqlite:///runs/mlflow.db", experiment="c4") as tracker:
    ...     tracker.log(10, {"train/loss": 9.8})
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        attempt: int,
        run_name: str,
        uri: str | None,
        experiment: str,
        parameters: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        datasets: Sequence[DatasetInfo] = (),
        artifacts: Sequence[Path] = (),
        parent: str | None = None,
    ):
        self.run_dir = run_dir
        self.artifacts_directory = run_dir / ARTIFACTS_DIRECTORY
        self._log = MetricLog(run_dir, attempt)
        self._log_failing = False
        self._run = TrackedRun(
            uri=masked(absolute_uri(uri)) if uri else None,
            experiment=experiment,
            run_name=run_name,
            attempt=attempt,
            parameters=masked_values(parameters or {}),
            tags={key: masked(str(value)) for key, value in (tags or {}).items()},
            datasets=list(datasets),
            artifacts=[_relative(path, run_dir) for path in artifacts],
            parent=parent,
        )
        if before := TrackedRun.load(run_dir):
            self._run.key, self._run.started = before.key, before.started
        self._run.save(run_dir)
        self._feeding = _FeedingThread(run_dir, self._run, uri) if uri else None

    @property
    def connects(self) -> bool:
        """Whether MLflow's client is imported or feeds for the first time, which takes seconds of the processor."""
        return self._feeding is not None and self._feeding.connects

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a row to the log of metrics. If the disk refuses it, warns once and keeps the row for later."""
        try:
            self._log.log(step, metrics)
            self._log_failing = False
        except OSError as error:
            if not self._log_failing:
                logger.warning("%s: %s; metrics are kept in memory until it can be written", self._log.path, error)
            self._log_failing = True

    def close(self, status: Status, timeout: float | None = None) -> None:
        """Ends the run. MLflow gets up to `timeout` seconds (default: 30) for what it lacks. May be called twice."""
        if self._run.ended is not None:
            return
        self._run.status, self._run.ended = status, time.time()
        try:
            self._log.flush()
            self._run.save(self.run_dir)
        except OSError as error:
            logger.warning("%s: %s", self.run_dir, error)
        self._log.close()
        if self._feeding and not self._feeding.close(SECONDS_FOR_THE_REST if timeout is None else timeout):
            logger.warning("MLflow lacks the end of this run; to feed it later: pretrain sync %s", self.run_dir)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Closes as finished, as failed after an exception, as killed after Ctrl-C or a call of exit."""
        self.close("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")


def sync(run_dir: Path, uri: str | None = None) -> int:
    """Sends MLflow everything of `run_dir` that it lacks; returns the number of metrics sent.

    `uri` names another MLflow than the run's own, for instance a server that the training machine can't reach. Raises
    UserError for a directory without a run, FailedError if MLflow can't be fed.
    """
    run = TrackedRun.load(run_dir)
    if run is None:
        raise UserError(f"{run_dir}: no tracking.json here; give the directory of a run that has been started")
    uri = uri or run.uri
    if uri is None:
        raise UserError(f"{run_dir}: the run was started without tracking.mlflow.uri; give one to sync to")
    if MASK in uri:
        raise UserError(f"{run_dir}: the password of {uri} isn't recorded; give --uri with it")
    feeder = MlflowFeeder(run_dir, run, uri)
    try:
        sent = feeder.feed()
        feeder.finish()
    except Exception as error:
        raise FailedError(f"{masked(uri)}: {one_line(error)}; what was sent is kept, sync again to continue") from error
    return sent


class _FeedingThread:
    """Calls the feeder every few seconds, less and less often while MLflow fails."""

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str):
        self._uri, self._address = masked(uri), uri
        self._feeder = MlflowFeeder(run_dir, run, uri)
        self._closing, self._closed = threading.Event(), threading.Event()
        self._failing = self._complete = self._tried = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="mlflow-feeder", daemon=True)
        self._thread.start()

    @property
    def connects(self) -> bool:
        return not self._tried and time.monotonic() - self._began < MOST_SECONDS_TO_CONNECT

    def close(self, timeout: float) -> bool:
        """Has the feeder send the rest. Returns whether MLflow has everything.

        An MLflow that was unreachable so far gets a few seconds, and the rest of `timeout` only if it then answers.
        """
        began = time.monotonic()
        self._closing.set()
        if self._failing:
            self._thread.join(min(timeout, SECONDS_FOR_A_RETURN))
        if not self._failing or answers(self._address):
            self._thread.join(max(timeout - (time.monotonic() - began), 0.0))
        self._closed.set()
        return self._complete

    def _work(self) -> None:
        pause, last_try = SECONDS_BETWEEN_FEEDS, math.inf
        self._closing.wait(SECONDS_BEFORE_FEEDS)
        while not self._complete and not self._closed.is_set():
            closing = self._closing.is_set()
            if closing:
                last_try = min(last_try, time.monotonic() + SECONDS_FOR_A_RETURN)
            try:
                self._feeder.feed()
                if closing:
                    self._feeder.finish()
                    self._complete = True
                if self._failing:
                    logger.warning("MLflow at %s accepts metrics again", self._uri)
                self._failing, pause = False, SECONDS_BETWEEN_FEEDS
            except Exception as error:
                if not self._failing:
                    logger.warning("MLflow at %s: %s; training goes on, will try again", self._uri, one_line(error))
                self._failing = True
                pause = min(2 * pause, LONGEST_PAUSE)
            self._tried = True
            if not closing:
                self._closing.wait(pause)
            elif not self._complete:
                if time.monotonic() > last_try and not answers(self._address):
                    return
                self._closed.wait(0.5)


def _relative(path: Path, run_dir: Path) -> str:
    """`path`, made relative if it is in the run directory, which may be synced from elsewhere."""
    path, run_dir = path.absolute(), run_dir.absolute()
    return str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path)
