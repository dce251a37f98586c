"""Feeds MLflow from a run directory. Feeding again is safe: MLflow keeps each point once.

RUN/tracking.json       the description of the run for MLflow (TrackedRun)
RUN/mlflow.json         how far MLflow has been fed (FeedState); a resumed run continues the same MLflow run
RUN/metrics.jsonl       the metrics
RUN/system/NODE.jsonl   the metrics of the machines
RUN/artifacts/          every file that appears here is uploaded; see uploads.py
RUN/checkpoints/        each checkpoint becomes a model with the metrics of its step; see checkpoints.py

What is sent for a line of metrics follows from the file up to that line alone, and MLflow takes an equal point (name,
step, time, value) only once. So sending lines again, after a kill came before the offset was saved, is harmless.
"""

import getpass
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.foundation.secrets import masked
from pretrain.run import metrics_file
from pretrain.run import system_metrics as system
from pretrain.run.metrics_file import Row
from pretrain.tracking.checkpoints import log_checkpoints
from pretrain.tracking.metric_points import RepeatedSteps, in_mlflow
from pretrain.tracking.mlflow_run import NOTE, FeedState, MlflowRun, TrackedRun
from pretrain.tracking.parent_runs import parent_run, settle_parent
from pretrain.tracking.store import (
    ARTIFACTS,
    DIGEST_LENGTH,
    METRICS_PER_BATCH,
    PARAMETER_LENGTH,
    PARAMETERS_PER_BATCH,
    TAG_LENGTH,
    absolute_uri,
    client,
    safe_key,
    sqlite_file,
    store_lock,
)
from pretrain.tracking.uploads import Uploads

# the value with which the UI opens an experiment on its training runs, not on its pages for language-model calls
_EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
_RUN_KEY = "run_key"


class MlflowFeeder:
    """Sends MLflow what it lacks of one run. `feed` and `finish` raise every error; calling them again continues."""

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str):
        self.run_dir, self.run, self.uri = run_dir, run, absolute_uri(uri)
        self._client: Any = None
        self._parent: str | None = None
        self._connection: tuple[MlflowRun, Uploads] | None = None
        path = run_dir / metrics_file.FILE_NAME
        self._repeated = RepeatedSteps(lambda: (row for row, _ in metrics_file.rows_from(path)))

    def feed(self) -> int:
        """Sends new metrics, files and checkpoints. Returns how many metrics were sent."""
        run, uploads = self._connected()
        sent = self._feed_rows(run, metrics_file.FILE_NAME, self._repeated.new_metrics)
        for file in system.files(self.run_dir):
            sent += self._feed_rows(run, str(file.relative_to(self.run_dir)), lambda row: row.metrics)
        uploads.send()
        log_checkpoints(run)
        return sent

    def finish(self) -> None:
        """Tells MLflow how the run ended, if it has."""
        if self.run.status != "RUNNING":
            run, _ = self._connected()
            ended = int((self.run.ended or time.time()) * 1000)
            self._client.set_terminated(run.state.run_id, self.run.status, end_time=ended)
            if self._parent:
                settle_parent(self._client, run.state.experiment_id, self._parent)

    def _connected(self) -> tuple[MlflowRun, Uploads]:
        """The MLflow run and its uploads; the first call creates or reopens the run and describes it."""
        if self._connection is None:
            with store_lock(self.uri):
                self._client = client(self.uri)
                experiment_id = self._experiment()
                self._parent = parent_run(self._client, experiment_id, self.run.parent) if self.run.parent else None
            state = self._existing_run() or self._new_run(experiment_id)
            state.save(self.run_dir)
            self._describe(state.run_id)
            run = MlflowRun(self._client, self.run_dir, self.run, state)
            self._connection = run, Uploads(run)
        return self._connection

    def _experiment(self) -> str:
        name, (kind, value) = self.run.experiment, _EXPERIMENT_KIND
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            database = sqlite_file(self.uri)
            # a server has its own place for artifacts; with a file, they must not land in the working directory
            location = (database.parent / ARTIFACTS / safe_key(name)).as_uri() if database else None
            return self._client.create_experiment(name, artifact_location=location, tags={kind: value})
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        if kind not in experiment.tags:
            self._client.set_experiment_tag(experiment.experiment_id, kind, value)
        return experiment.experiment_id

    def _existing_run(self) -> FeedState | None:
        from mlflow.exceptions import MlflowException  # mlflow takes a second to import

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
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag  # see above

        self._client.update_run(run_id, status="RUNNING", name=self.run.run_name)
        data = self._client.get_run(run_id).data
        known = data.params
        parameters = flatten(self.run.parameters)
        new = [Param(key, value) for key, value in parameters.items() if key not in known]
        for start in range(0, len(new), PARAMETERS_PER_BATCH):
            self._client.log_batch(run_id, params=new[start : start + PARAMETERS_PER_BATCH])

        tags = {"mlflow.user": _user(), "mlflow.source.type": "LOCAL", "mlflow.source.name": "pretrain train"}
        tags |= {"attempts": str(self.run.attempt), "run_directory": str(self.run_dir.resolve())}
        if self._parent:
            tags["mlflow.parentRunId"] = self._parent
        for key in parameters.keys() & known.keys():
            if parameters[key] != known[key]:
                tags[f"changed.{key}"] = f"{known[key]} → {parameters[key]} (attempt {self.run.attempt})"
        tags |= {key: value for key, value in self.run.tags.items() if key != NOTE or NOTE not in data.tags}
        run_tags = [RunTag(safe_key(key), str(value)[:TAG_LENGTH]) for key, value in tags.items()]
        for start in range(0, len(run_tags), PARAMETERS_PER_BATCH):
            self._client.log_batch(run_id, tags=run_tags[start : start + PARAMETERS_PER_BATCH])

        inputs = []
        for name, info in self.run.named_datasets():
            source, profile = json.dumps({"uri": info.source}), json.dumps(info.profile)
            dataset = Dataset(name, info.digest[:DIGEST_LENGTH], "local", source, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", info.context)]))
        if inputs:
            self._client.log_inputs(run_id, inputs)

    def _feed_rows(self, run: MlflowRun, name: str, new_metrics: Callable[[Row], Mapping[str, float]]) -> int:
        """Sends the new rows of a file of metrics; `new_metrics` selects the metrics of a row that MLflow lacks."""
        path, offset = self.run_dir / name, run.state.offsets.get(name, 0)
        size = path.stat().st_size if path.exists() else 0
        if size < offset:  # the file system lost the end of the file; some of the rest may be sent again
            offset = 0
        sent = 0
        for metrics, end in _batches(path, offset, new_metrics) if size > offset else ():
            self._client.log_batch(run.state.run_id, metrics=metrics)
            run.state.offsets[name] = end
            run.save()
            sent += len(metrics)
        return sent


def _batches(
    path: Path, offset: int, new_metrics: Callable[[Row], Mapping[str, float]]
) -> Iterator[tuple[list[Any], int]]:
    """Batches of MLflow metrics, each with the offset behind its last row."""
    from mlflow.entities import Metric  # mlflow takes a second to import

    batch: list[Any] = []
    for row, end in metrics_file.rows_from(path, offset):
        values = new_metrics(row)
        if batch and len(batch) + len(values) > METRICS_PER_BATCH:
            yield batch, offset
            batch = []
        batch += [Metric(in_mlflow(name), value, int(row.time * 1000), row.step) for name, value in values.items()]
        offset = end
    yield batch, offset


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
            flat[safe_key(name)] = str(value)[:PARAMETER_LENGTH]
    return flat


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's numeric user without a name
        return str(os.getuid())
