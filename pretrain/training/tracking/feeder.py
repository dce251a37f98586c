"""Feeds MLflow from a run directory.

RUN/tracking.json       the description of the run for MLflow (TrackedRun)
RUN/mlflow.json         how far MLflow has been fed (FeedState); a resumed run continues the same MLflow run
RUN/metrics.jsonl       the metrics
RUN/artifacts/          every file here is uploaded, under its own path, except
  evaluation/NAME.json                 a table: MLflow's UI lists it as one
  evaluation/NAME/step-00001000.png    an image pictures/NAME of a step: the UI has a slider over the steps
Feeding again is safe, for instance after a kill before the offset was saved: MLflow keeps equal points (name, step,
time, value) once.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.tracking.context.registry import resolve_tags

from data_pipeline.base.atomic import TEMPORARY_SUFFIX
from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import masked, printable
from pretrain.run import ARTIFACTS_DIRECTORY, metrics_file
from pretrain.training.tracking.mlflow_store import (
    ARTIFACTS,
    KEY_LENGTH,
    NOTE,
    FeedState,
    TrackedRun,
    absolute_uri,
    client,
    create_tables,
    in_mlflow,
    one_line,
    safe_key,
    sqlite_file,
)

# with this tag, the UI opens an experiment on its training runs, not on its pages for language-model calls
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_RUN_KEY = "run_key"  # a tag
_ROWS_AT_ONCE = 100
_STEP = re.compile(r"step-(\d+)\.png")
_TABLE = re.compile(rf"{ARTIFACTS_DIRECTORY}/evaluation/.+\.json")
_PARAMETER_LENGTH, _DATASET_LENGTH, _DIGEST_LENGTH = 6000, 500, 36  # MLflow's limits
_FILE_LENGTH = 60  # of names of folders and images: a letter may take four bytes, and MLflow adds to an image's name
_MOST_FAILURES = 5  # files that fail in one feed; then it looks as if none can be sent


@dataclass
class MlflowRun:
    """A run, MLflow's client, and the part of the run that MLflow has."""

    client: MlflowClient
    directory: Path
    description: TrackedRun
    state: FeedState
    described: bool = False

    def save(self) -> None:
        with contextlib.suppress(OSError):  # what was sent may be sent again, which is harmless
            self.state.save(self.directory)


def connected(run_dir: Path, run: TrackedRun, uri: str) -> MlflowRun:
    """Creates or reopens the run in MLflow. Raises all errors of MLflow; calling it again continues."""
    uri = absolute_uri(uri)
    create_tables(uri)
    mlflow_client = client(uri)
    experiment_id = _experiment(mlflow_client, run.experiment, sqlite_file(uri))
    found = mlflow_client.search_runs([experiment_id], f"tags.{_RUN_KEY} = '{run.key}'", max_results=1)
    started, tags = int(run.started * 1000), {_RUN_KEY: run.key}
    opened = found[0] if found else mlflow_client.create_run(experiment_id, started, tags, run.run_name[:KEY_LENGTH])
    state, before = FeedState(masked(uri), experiment_id, opened.info.run_id), FeedState.load(run_dir)
    if before and (before.tracking_uri, before.run_id) == (state.tracking_uri, state.run_id):
        state = before
    connection = MlflowRun(mlflow_client, run_dir, run, state)
    connection.save()
    return connection


def feed(run: MlflowRun) -> int:
    """Sends new metrics, the description, the end of the run, and new files. Returns the number of metrics sent.

    If files can't be sent, the others are sent, and FailedError is raised with the first of them. Raises all errors of
    MLflow. Calling it again continues.
    """
    sent = _feed_rows(run, metrics_file.FILE_NAME)
    if not run.described:
        _describe(run)
        run.described = True
    if run.description.status != "RUNNING":
        end = int((run.description.ended or time.time()) * 1000)
        run.client.set_terminated(run.state.run_id, run.description.status, end_time=end)
    _upload_files(run)
    return sent


def _experiment(mlflow_client: MlflowClient, name: str, database: Path | None) -> str:
    """The id of the experiment `name`, which is created if MLflow lacks it."""
    if experiment := mlflow_client.get_experiment_by_name(name):
        return experiment.experiment_id
    # a server has a place for artifacts; with a sqlite file, artifacts would land in the working directory
    location = (database.parent / ARTIFACTS / safe_key(name, _FILE_LENGTH)).as_uri() if database else None
    try:
        return mlflow_client.create_experiment(name, location, _EXPERIMENT_TAGS)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # created by a run that started at the same time
            raise
        return mlflow_client.get_experiment_by_name(name).experiment_id


def _describe(run: MlflowRun) -> None:
    """Sends parameters, tags and datasets. MLflow never changes a parameter, so a changed value becomes a tag."""
    description, run_id = run.description, run.state.run_id
    data = run.client.get_run(run_id).data
    run.client.update_run(run_id, status="RUNNING", name=description.run_name[:KEY_LENGTH])
    known, parameters = data.params, flatten(description.parameters)
    tags = {**resolve_tags(), "mlflow.source.name": "pretrain train"}
    tags |= {"attempts": str(description.attempt), "run_directory": printable(str(run.directory.resolve()))}
    for key in parameters.keys() & known.keys():
        if parameters[key] != known[key]:
            tags[f"changed.{key}"] = f"{known[key]} → {parameters[key]} (attempt {description.attempt})"
    tags |= {key: value for key, value in description.tags.items() if key != NOTE or NOTE not in data.tags}
    params = [Param(key, value) for key, value in parameters.items() if key not in known]
    run.client.log_batch(run_id, params=params, tags=[RunTag(safe_key(key), str(tags[key])) for key in tags])
    inputs = []
    for info in description.datasets:
        # MLflow keeps one input of each name and digest, and a corpus may be both trained and validated on
        name, digest = f"{info.name} ({info.context})"[:_DATASET_LENGTH], info.digest[:_DIGEST_LENGTH]
        source, profile = json.dumps({"uri": info.source}), json.dumps(info.profile)
        dataset = Dataset(name, digest, source_type="local", source=source, profile=profile)
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", info.context)]))
    if inputs:
        run.client.log_inputs(run_id, inputs)


def _feed_rows(run: MlflowRun, name: str) -> int:
    """Sends the new rows of a file of metrics. Returns the number of metrics."""
    path, offset = run.directory / name, run.state.offsets.get(name, 0)
    if not path.exists() or path.stat().st_size < offset:  # the file system lost the end of the file
        offset = 0
    rows, sent = metrics_file.rows_from(path, offset), 0
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        metrics = [
            Metric(in_mlflow(name), value, int(row.time * 1000), row.step)
            for row, _ in batch
            for name, value in row.metrics.items()
        ]
        run.client.log_batch(run.state.run_id, metrics=metrics)
        sent += len(metrics)
        _, run.state.offsets[name] = batch[-1]
        run.save()
    return sent


def _upload_files(run: MlflowRun) -> None:
    """Uploads new and changed files. A changed file replaces the earlier one; a changed image is added to it. Raises
    FailedError if some can't be uploaded."""
    failures = []
    for path, target in _files(run):
        name = printable(str(path.relative_to(run.directory)))
        try:
            _upload(run, path, target, name)
        except Exception as error:  # of MLflow, the connection, the place for artifacts or the file
            failures.append((name, error))
        if len(failures) == _MOST_FAILURES:
            break
    if failures:
        name, first = failures[0]
        raise FailedError(f"{name}: {one_line(first)}") from first


def _files(run: MlflowRun) -> Iterator[tuple[Path, PurePosixPath]]:
    """The files to upload, each with its path among the run's artifacts in MLflow."""
    for name in run.description.artifacts:
        yield run.directory / name, PurePosixPath(name)
    directory = run.directory / ARTIFACTS_DIRECTORY
    for path in sorted(directory.rglob("*")):
        yield path, PurePosixPath(path.relative_to(directory))


def _upload(run: MlflowRun, path: Path, target: PurePosixPath, name: str) -> None:
    """Uploads a file, if it is new or has changed."""
    if not path.is_file() or path.name.endswith(TEMPORARY_SUFFIX):
        return
    stat = path.stat()
    version = [stat.st_mtime_ns, stat.st_size]
    if version == run.state.files.get(name):
        return
    if found := _STEP.fullmatch(target.name):
        shown = "/".join(["pictures", *target.parent.parts[1:]])
        key = safe_key(shown, _FILE_LENGTH, r"[^A-Za-z0-9_\-./ ]")
        run.client.log_image(run.state.run_id, mlflow.Image(str(path)), key=key, step=int(found[1]))
    else:
        folder = str(target.parent)
        run.client.log_artifact(run.state.run_id, str(path), None if folder == "." else folder)
    run.state.files[name] = version
    if _TABLE.fullmatch(name):
        _list_tables(run)
    run.save()


def _list_tables(run: MlflowRun) -> None:
    """Tells MLflow's UI which artifacts are tables."""
    tables = sorted(one.removeprefix(f"{ARTIFACTS_DIRECTORY}/") for one in run.state.files if _TABLE.fullmatch(one))
    listed = json.dumps([{"path": table, "type": "table"} for table in tables])
    run.client.set_tag(run.state.run_id, "mlflow.loggedArtifacts", listed)


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
            flat[safe_key(name)] = str(value)[:_PARAMETER_LENGTH]
    return flat
