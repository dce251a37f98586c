"""Feeds MLflow from a run directory. Feeding again is safe: MLflow keeps each point once.

RUN/tracking.json   the description of the run for MLflow (TrackedRun)
RUN/mlflow.json     how far MLflow has been fed (FeedState); a resumed run continues the same MLflow run
RUN/metrics.jsonl   the metrics
RUN/artifacts/      every file that appears here is uploaded, under its own path

What is sent for a line of metrics.jsonl follows from the file up to that line alone, and MLflow takes an equal point
(name, step, time, value) only once. So sending lines again, after a kill came before the offset was saved, is harmless.
"""

import contextlib
import getpass
import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, hidden, reveal, write_json
from data_pipeline.foundation.json_file import read_sound_json
from data_pipeline.foundation.locks import lock
from data_pipeline.foundation.secrets import masked
from pretrain.metrics import log as metric_log

TRACKING_FILE = "tracking.json"
STATE_FILE = "mlflow.json"
ARTIFACTS_DIRECTORY = "artifacts"

# MLflow would report its use to its developers, from the client and from the server
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
# retries are this module's own; MLflow's would hold a closing run for minutes
_FAIL_FAST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

# MLflow's limits (mlflow/utils/validation.py)
_METRICS_PER_BATCH, _PARAMETERS_PER_BATCH = 1000, 100
_KEY_LENGTH, _PARAMETER_LENGTH, _TAG_LENGTH, _DIGEST_LENGTH = 250, 6000, 8000, 36

# the value with which the UI opens an experiment on its training runs, not on its pages for language-model calls
_EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
_RUN_KEY = "run_key"


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


@dataclass
class TrackedRun:
    """The description of a run for MLflow. `key` finds the run in MLflow again if mlflow.json is lost."""

    uri: str | None
    experiment: str
    run_name: str
    attempt: int
    parameters: dict[str, Any]
    tags: dict[str, str]
    datasets: list[DatasetInfo]
    artifacts: list[str]
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / TRACKING_FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> "TrackedRun | None":
        return read_sound_json(run_dir / TRACKING_FILE, cls)


@dataclass
class FeedState:
    """RUN/mlflow.json. `offset`: bytes of metrics.jsonl that MLflow has; `files`: [mtime_ns, bytes] of each upload."""

    tracking_uri: str
    experiment_id: str
    run_id: str
    offset: NonNegativeInt = 0
    files: dict[str, list[int]] = field(default_factory=dict)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / STATE_FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> "FeedState | None":
        return read_sound_json(run_dir / STATE_FILE, cls)


class MlflowFeeder:
    """Sends MLflow what it lacks of one run. `feed` and `finish` raise every error; calling them again continues."""

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str):
        self.run_dir, self.run, self.uri = run_dir, run, absolute_uri(uri)
        self._client: Any = None
        self._replays = _Replays(run_dir / metric_log.FILE_NAME)
        self._state: FeedState | None = None

    def feed(self) -> int:
        """Sends new metrics and files. Returns how many metrics were sent."""
        state = self._connected()
        path = self.run_dir / metric_log.FILE_NAME
        size = path.stat().st_size if path.exists() else 0
        if size < state.offset:  # the file system lost the end of the file; some of the rest may be sent again
            state.offset = 0
        sent = 0
        for metrics, offset in self._batches(path, state.offset) if size > state.offset else ():
            self._client.log_batch(state.run_id, metrics=metrics)
            state.offset = offset
            state.save(self.run_dir)
            sent += len(metrics)
        self._upload_files(state)
        return sent

    def finish(self) -> None:
        """Tells MLflow how the run ended, if it has."""
        if self.run.status != "RUNNING":
            ended = int((self.run.ended or time.time()) * 1000)
            self._client.set_terminated(self._connected().run_id, self.run.status, end_time=ended)

    def _connected(self) -> FeedState:
        """The state of the MLflow run; the first call creates or reopens the run and describes it."""
        if self._state is None:
            with creating_alone(self.uri):
                self._client = _client(self.uri)
                experiment_id = self._experiment()
            state = self._existing_run() or self._new_run(experiment_id)
            state.save(self.run_dir)
            self._describe(state.run_id)
            self._state = state
        return self._state

    def _experiment(self) -> str:
        name, (kind, value) = self.run.experiment, _EXPERIMENT_KIND
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            database = sqlite_file(self.uri)
            # a server has its own place for artifacts; with a file, they must not land in the working directory
            location = (database.parent / "mlartifacts" / _safe_key(name)).as_uri() if database else None
            return self._client.create_experiment(name, artifact_location=location, tags={kind: value})
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        if kind not in experiment.tags:
            self._client.set_experiment_tag(experiment.experiment_id, kind, value)
        return experiment.experiment_id

    def _existing_run(self) -> FeedState | None:
        from mlflow.exceptions import MlflowException

        state = FeedState.load(self.run_dir)
        if state is None or state.tracking_uri != masked(self.uri):
            return None
        try:
            self._client.get_run(state.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # the database has been replaced
                return None
            raise
        return state

    def _new_run(self, experiment_id: str) -> FeedState:
        found = self._client.search_runs([experiment_id], f"tags.{_RUN_KEY} = '{self.run.key}'", max_results=1)
        started = int(self.run.started * 1000)
        tags = {_RUN_KEY: self.run.key}
        run = found[0] if found else self._client.create_run(experiment_id, started, tags, self.run.run_name)
        return FeedState(masked(self.uri), experiment_id, run.info.run_id)

    def _describe(self, run_id: str) -> None:
        """Parameters, tags and datasets. MLflow never changes a parameter: a changed value becomes a tag."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        self._client.update_run(run_id, status="RUNNING", name=self.run.run_name)
        known = self._client.get_run(run_id).data.params
        parameters = flatten(self.run.parameters)
        new = [Param(key, value) for key, value in parameters.items() if key not in known]
        for start in range(0, len(new), _PARAMETERS_PER_BATCH):
            self._client.log_batch(run_id, params=new[start : start + _PARAMETERS_PER_BATCH])

        tags = {"mlflow.user": _user(), "mlflow.source.type": "LOCAL", "mlflow.source.name": "pretrain train"}
        tags |= {"attempts": str(self.run.attempt), "run_directory": str(self.run_dir.resolve())}
        if commit := self.run.tags.get("git_commit"):
            tags["mlflow.source.git.commit"] = commit
        for key in parameters.keys() & known.keys():
            if parameters[key] != known[key]:
                tags[f"changed.{key}"] = f"{known[key]} → {parameters[key]} (attempt {self.run.attempt})"
        tags |= self.run.tags
        run_tags = [RunTag(_safe_key(key), str(value)[:_TAG_LENGTH]) for key, value in tags.items()]
        for start in range(0, len(run_tags), _PARAMETERS_PER_BATCH):
            self._client.log_batch(run_id, tags=run_tags[start : start + _PARAMETERS_PER_BATCH])

        inputs, names = [], set()
        for info in self.run.datasets:
            # MLflow keeps one input for a name and digest: a corpus that also validates needs a second name
            name = info.name if info.name not in names else f"{info.name} ({info.context})"
            names.add(name)
            source, profile = json.dumps({"uri": info.source}), json.dumps(info.profile)
            dataset = Dataset(name, info.digest[:_DIGEST_LENGTH], "local", source, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", info.context)]))
        if inputs:
            self._client.log_inputs(run_id, inputs)

    def _batches(self, path: Path, offset: int) -> Iterator[tuple[list[Any], int]]:
        """Batches of MLflow metrics, each with the offset that is reached once the batch is sent."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        for row, end in metric_log.rows_from(path, offset):
            values = self._replays.unsent(row)
            if batch and len(batch) + len(values) > _METRICS_PER_BATCH:
                yield batch, offset
                batch = []
            batch += [Metric(_safe_key(name), value, int(row.time * 1000), row.step) for name, value in values.items()]
            offset = end
        yield batch, offset

    def _upload_files(self, state: FeedState) -> None:
        directory = self.run_dir / ARTIFACTS_DIRECTORY
        files = {name: (self.run_dir / name, "") for name in self.run.artifacts}  # joining keeps an absolute path
        for file in sorted(directory.rglob("*")):
            if not file.name.endswith(TEMPORARY_SUFFIX):
                files[str(file.relative_to(self.run_dir))] = file, str(file.parent.relative_to(directory))
        for name, (file, folder) in files.items():
            if not file.is_file():
                continue
            version = [file.stat().st_mtime_ns, file.stat().st_size]
            if state.files.get(name) != version:
                self._client.log_artifact(state.run_id, str(file), folder if folder not in ("", ".") else None)
                state.files[name] = version
                state.save(self.run_dir)


class _Replays:
    """Recognises steps that an attempt repeats.

    After a resume, the steps between the checkpoint and the crash are logged twice. If the losses are bitwise equal, as
    on CPU, MLflow has the step already. If they differ, the new point is sent too and follows the old one at its step,
    since MLflow can't delete a point.
    """

    def __init__(self, path: Path):
        self._path = path
        self._attempt: int | None = None
        self._earlier: dict[int, dict[str, float]] = {}

    def unsent(self, row: metric_log.Row) -> dict[str, float]:
        """The metrics of `row` that MLflow doesn't have from an earlier attempt. Rows come in the order of the file."""
        if row.attempt != self._attempt:
            self._attempt, self._earlier = row.attempt, {}
            for other, _ in metric_log.rows_from(self._path):
                if other.attempt < row.attempt and other.step >= row.step:
                    self._earlier.setdefault(other.step, {}).update(other.metrics)
        before = self._earlier.get(row.step, {})
        shared = before.keys() & row.metrics.keys()
        deciding = {name for name in shared if name.endswith("loss")} or shared  # speeds are never equal
        if shared and all(_equal(before[name], row.metrics[name]) for name in deciding):
            return {name: value for name, value in row.metrics.items() if name not in before}
        return row.metrics


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
    _client(f"sqlite:///{new}").search_experiments(max_results=1)
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


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as MLflow parameters.

    >>> flatten({"model": {"family": "t5"}, "data": {"train": [{"corpus": "c4"}]}, "optimizer": {"betas": [0.9, 0.99]}})
    {'model.family': 't5', 'data.train.0.corpus': 'c4', 'optimizer.betas': '[0.9, 0.99]'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(position): item for position, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[_safe_key(name)] = str(value)[:_PARAMETER_LENGTH]
    return flat


def _safe_key(name: str) -> str:
    """`name` without what MLflow refuses: unusual characters, empty or dotted parts of a path, excess length."""
    parts = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))[:_KEY_LENGTH].rstrip("/") or "_"


def _equal(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's numeric user without a name
        return str(os.getuid())


def _client(uri: str) -> Any:
    """An MLflow client. Importing MLflow takes a second, so it isn't imported with this module."""
    os.environ.update(NO_TELEMETRY)
    for name, value in _FAIL_FAST.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    # errors are raised and reported in one line; MLflow's own logger would add pages of traceback
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)
