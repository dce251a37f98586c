"""Tracks a run in a local file of metrics, and feeds MLflow from this file in a thread.

Training only waits until a line is appended to RUN/metrics.jsonl. A daemon thread sends the file to MLflow. While
MLflow is slow, locked or unreachable, its UI lacks curves, but training is unaffected. Only rank 0 has a tracker.
"""

import contextlib
import logging
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import masked, masked_values
from data_pipeline.base.processes import PYTHON
from pretrain.run.metrics_file import MetricLog
from pretrain.training.tracking.mlflow_store import (
    HOST,
    FeedState,
    TrackedRun,
    absolute_uri,
    client,
    one_line,
    safe_key,
    with_password,
)

if TYPE_CHECKING:
    from pretrain.training.tracking.feeder import MlflowRun

Status = Literal["FINISHED", "FAILED", "KILLED"]

SECONDS_BEFORE_FEEDS = 2.0  # importing MLflow's client takes seconds of the processor, which the first step needs
SECONDS_BETWEEN_FEEDS = 2.0
MOST_SECONDS_TO_CONNECT = 30.0  # that importing the client and the first feed may slow this rank down
SECONDS_FOR_THE_REST = 30.0  # limit of the last feed
SECONDS_FOR_A_RETURN = 3.0  # if MLflow is away when a run ends
SECONDS_BETWEEN_LAST_FEEDS = 0.5
SECONDS_BETWEEN_MONITORS = 10.0
LONGEST_PAUSE = 120.0
logger = logging.getLogger(__name__)


class Tracker:
    """Logs a run's metrics and feeds them to MLflow, unless `uri` is None.

    Files that appear in RUN/artifacts later, whole under their final names, are uploaded too. Nothing here raises or
    waits because of MLflow. Passwords in URLs are recorded as ***.

    >>> with Tracker(run_dir, TrackedRun("c4", "t5", attempt=1), "sqlite:///runs/mlflow.db") as tracker:
    ...     tracker.log(10, {"train/loss": 9.8})
    """

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str | None):
        self.run_dir = run_dir
        self._log = MetricLog(run_dir, run.attempt)
        self._log_failing = False
        self._run = replace(
            run,
            uri=masked(absolute_uri(uri)) if uri else None,
            parameters=masked_values(run.parameters),
            tags={HOST: platform.node(), **{key: masked(value) for key, value in run.tags.items()}},
        )
        if before := TrackedRun.load(run_dir):
            self._run.key, self._run.started = before.key, before.started
        self._run.save(run_dir)
        self._uri = uri or ""
        self._closing, self._closed = threading.Event(), threading.Event()
        self._complete = self._tried = not uri
        self._began = time.monotonic()
        self._feeding = threading.Thread(target=self._feed, name="mlflow-feeder", daemon=True)
        if uri:
            self._feeding.start()

    @property
    def connects(self) -> bool:
        """True while MLflow's client is imported and feeds for the first time, which takes seconds of the processor."""
        return not self._tried and time.monotonic() - self._began < MOST_SECONDS_TO_CONNECT

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
        """Ends the run. The last feed may take 30 seconds, or a few if MLflow is away. May be called twice."""
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
        if self._uri:
            self._feeding.join(SECONDS_FOR_THE_REST)
        self._closed.set()
        if not self._complete:
            logger.warning("MLflow lacks the end of this run; to feed it later: pretrain sync %s", self.run_dir)

    def _feed(self) -> None:
        """Feeds MLflow every few seconds, less and less often while it fails."""
        failing = False
        pause = SECONDS_BETWEEN_FEEDS
        last_try: float | None = None
        connection: MlflowRun | None = None
        self._closing.wait(SECONDS_BEFORE_FEEDS)
        while not self._closed.is_set():
            closing = self._closing.is_set()
            if closing and last_try is None:
                last_try = time.monotonic() + SECONDS_FOR_A_RETURN
            try:
                from pretrain.training.tracking import feeder  # MLflow takes 4 s and 175 MB, and may not be importable

                connection = connection or feeder.connected(self.run_dir, self._run, self._uri)
                feeder.feed(connection)
                self._complete = closing
                if failing:
                    logger.warning("MLflow at %s accepts metrics again", masked(self._uri))
                failing, pause = False, SECONDS_BETWEEN_FEEDS
            except Exception as error:
                connection = None  # the run may be deleted there; the next try makes another one
                if not failing:
                    address, reason = masked(self._uri), one_line(error)
                    logger.warning("MLflow at %s: %s; training continues, will try again", address, reason)
                failing, pause = True, min(2 * pause, LONGEST_PAUSE)
            self._tried = True
            if self._complete or (last_try is not None and time.monotonic() > last_try):
                return
            if closing:
                self._closed.wait(SECONDS_BETWEEN_LAST_FEEDS)
            else:
                self._closing.wait(pause)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Closes as finished, as failed after an exception, as killed after Ctrl-C or a call of exit."""
        self.close("FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED")


class SystemMetrics:
    """`tracking.mlflow.log_system_metrics`: MLflow's own monitor of this machine, in a thread of the first rank there.

    The monitor sends its samples straight to MLflow, as system/NAME, or system/NODE/NAME with a `node`. It waits until
    rank 0 has created the run. If MLflow doesn't answer, the samples until then are lost, and another monitor begins.
    """

    def __init__(self, run_dir: Path, uri: str, node: str | None = None):
        self._run_dir, self._uri, self._node = run_dir, absolute_uri(uri), node
        self._closing = threading.Event()
        threading.Thread(target=self._work, name="system-metrics", daemon=True).start()

    def close(self) -> None:
        """Begins no other monitor. The current one ends at its next sample after MLflow has the end of the run."""
        self._closing.set()

    def _work(self) -> None:
        while not self._closing.wait(SECONDS_BETWEEN_MONITORS):
            with contextlib.suppress(Exception):  # rank 0 reports an MLflow that is away; a disk may answer later
                state = FeedState.load(self._run_dir)
                if state and state.tracking_uri == masked(self._uri):
                    self._monitor(state.run_id)

    def _monitor(self, run_id: str) -> None:
        """Samples until MLflow doesn't answer, or says that the run has ended."""
        client(self._uri)  # sets MLflow's timeouts and its logger
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor  # 4 s and 175 MB, in a thread

        name = safe_key(self._node) if self._node else None
        SystemMetricsMonitor(run_id, resume_logging=True, node_id=name, tracking_uri=self._uri).monitor()


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
    from pretrain.training.tracking import feeder  # MLflow takes 4 s and 175 MB: in a thread of a run

    run = TrackedRun.load(run_dir)
    if run is None:
        raise UserError(f"{run_dir}: no tracking.json here; give the directory of a run that has been started")
    uri = uri or run.uri
    if uri is None:
        raise UserError(f"{run_dir}: the run was started without tracking.mlflow.uri; give one to sync to")
    uri = with_password(uri)
    try:
        return feeder.feed(feeder.connected(run_dir, run, uri))
    except Exception as error:
        raise FailedError(f"{masked(uri)}: {one_line(error)}; what was sent is kept, sync again to continue") from error
