"""Tracks a run in a local file of metrics, and feeds MLflow from this file in a thread.

Training only waits until a line is appended to RUN/metrics.jsonl. A daemon thread sends the file to MLflow. While
MLflow is slow, locked or unreachable, its UI lacks curves, but training is unaffected. Only rank 0 has a tracker.
"""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import masked, masked_values, printable
from data_pipeline.base.processes import PYTHON
from pretrain.run.metrics_file import MetricLog
from pretrain.training.tracking.mlflow_store import (
    FeedState,
    TrackedRun,
    absolute_uri,
    client,
    one_line,
    with_password,
)

Status = Literal["FINISHED", "FAILED", "KILLED"]

SECONDS_BEFORE_FEEDS = 2.0  # importing MLflow's client takes seconds of the processor, which the first step needs
SECONDS_BETWEEN_FEEDS = 2.0
SECONDS_FOR_THE_REST = 30.0  # limit of the last feed
SECONDS_BETWEEN_MONITORS = 10.0
LONGEST_PAUSE = 120.0
logger = logging.getLogger(__name__)


class Tracker:
    """Logs a run's metrics and feeds them to MLflow, unless `uri` is None.

    Files that appear in RUN/artifacts later, whole under their final names, are uploaded too. Nothing here raises or
    waits because of MLflow. Passwords in URLs are recorded as ***.

    Attributes:
        connects: True while MLflow's client is imported and feeds for the first time, which takes processor time.

    >>> tracker = Tracker(run_dir, TrackedRun("c4", "t5", attempt=1), "sqlite:///runs/mlflow.db")
    >>> tracker.log(10, {"train/loss": 9.8})
    >>> tracker.close("FINISHED")
    """

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str | None):
        self.run_dir = run_dir
        self._log, self._log_failing = MetricLog(run_dir, run.attempt), False
        self._run = replace(
            run,
            uri=masked(absolute_uri(uri)) if uri else None,
            parameters=masked_values(run.parameters),
            tags=masked_values(run.tags),
            directory=printable(str(run_dir.resolve())),
        )
        if before := TrackedRun.load(run_dir):
            self._run.started = before.started
            if _is_copied(before, run_dir):
                (run_dir / FeedState.file).unlink(missing_ok=True)
            else:
                self._run.key = before.key
        fed = FeedState.load(run_dir)
        if fed and fed.offset > self._log.path.stat().st_size:  # a power cut took the last rows
            replace(fed, offset=0).save(run_dir)
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


def _is_copied(run: TrackedRun, run_dir: Path) -> bool:
    """True if `run_dir`, which has the description `run`, is a copy: the directory that `run` names is there, too, with
    the same key. False if the directory was moved."""
    origin = Path(run.directory)
    there = TrackedRun.load(origin) if run.directory else None
    return there is not None and there.key == run.key and not origin.samefile(run_dir)


def sample_machine(run_dir: Path, uri: str, node: str | None, ended: threading.Event) -> None:
    """`tracking.mlflow.log_system_metrics`: MLflow's own monitor samples this machine until `ended` is set.

    The monitor sends its samples straight to MLflow, as system/NAME, or system/NODE/NAME with a `node`. It waits until
    rank 0 has created the run. If MLflow doesn't answer, the samples until then are lost, and another monitor begins.
    """
    while not ended.wait(SECONDS_BETWEEN_MONITORS):
        with contextlib.suppress(Exception):  # rank 0 reports an MLflow that is away; a disk may answer later
            if (state := FeedState.load(run_dir)) and state.tracking_uri == masked(absolute_uri(uri)):
                client(uri)  # sets MLflow's timeouts and its logger
                from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor  # 4 s and 175 MB

                SystemMetricsMonitor(
                    state.run_id, resume_logging=True, node_id=node, tracking_uri=absolute_uri(uri)
                ).monitor()


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
