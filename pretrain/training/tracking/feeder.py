"""Feeds MLflow from a run directory.

RUN/tracking.json       the description of the run for MLflow (TrackedRun)
RUN/mlflow.json         how far MLflow has been fed (FeedState); a resumed run continues the same MLflow run
RUN/metrics.jsonl       the metrics
RUN/system/NODE.jsonl   the metrics of the machines
RUN/artifacts/          every file here is uploaded, under its own path, except
  evaluation/NAME.json                 a table: MLflow's UI lists it as one
  evaluation/NAME/step-00001000.png    an image pictures/NAME of a step: the UI has a slider over the steps
Feeding again is safe, for instance after a kill before the offset was saved: MLflow keeps equal points (name, step,
time, value) once.
"""

import glob
import json
import re
import time
from collections.abc import Mapping
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
from pretrain.run.system_metrics import files_of_machines
from pretrain.training.tracking.mlflow_store import (
    ARTIFACTS,
    HOST,
    KEY_LENGTH,
    NOTE,
    DeletedError,
    FeedState,
    MlflowRun,
    TrackedRun,
    absolute_uri,
    client,
    create_tables,
    file_version,
    in_mlflow,
    one_line,
    parent_run,
    safe_key,
    sqlite_file,
)

# with this tag, the UI opens an experiment on its training runs, not on its pages for language-model calls
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_RUN_KEY, _DIRECTORY = "run_key", "run_directory"  # tags
_ROWS_AT_ONCE = 100
_STEP = re.compile(r"step-(\d+)\.png")
_TABLE = re.compile(rf"{ARTIFACTS_DIRECTORY}/evaluation/.+\.json")
_PARAMETER_LENGTH = 6000  # MLflow cuts longer values
# of names of artifacts: MLflow adds up to 100 characters to an image's name, and a letter may take four bytes
_FILE_LENGTH, _FOLDER_LENGTH = 120, 60


def connected(run_dir: Path, run: TrackedRun, uri: str) -> MlflowRun:
    """Creates or reopens the run in MLflow. Raises DeletedError if its experiment is deleted, and all errors of MLflow;
    calling it again continues."""
    uri = absolute_uri(uri)
    create_tables(uri)
    mlflow_client = client(uri)
    experiment_id = _experiment(mlflow_client, run.experiment, sqlite_file(uri))
    parent = parent_run(mlflow_client, experiment_id, run.parent) if run.parent else None
    found = mlflow_client.search_runs([experiment_id], f"tags.{_RUN_KEY} = '{run.key}'", max_results=1)
    started, tags = int(run.started * 1000), {_RUN_KEY: run.key}
    opened = found[0] if found else mlflow_client.create_run(experiment_id, started, tags, run.run_name[:KEY_LENGTH])
    state, before = FeedState(masked(uri), experiment_id, opened.info.run_id), FeedState.load(run_dir)
    if before and (before.tracking_uri, before.run_id) == (state.tracking_uri, state.run_id):
        state = before
    connection = MlflowRun(mlflow_client, run_dir, run, state, parent)
    connection.save()
    return connection


def feed(run: MlflowRun) -> int:
    """Sends the description, new metrics and files, and the end of the run. Returns the number of metrics that MLflow
    has taken.

    Parts that MLflow refuses are set aside with a warning. If other parts could not be sent, the rest is sent, and
    FailedError is raised. Raises all errors of an MLflow that doesn't answer. Calling it again continues.
    """
    run.unsent.clear()
    ended = run.description.status != "RUNNING"
    if ended:
        run.aside.clear()  # the parts may have been repaired meanwhile
    files = [run.directory / metrics_file.FILE_NAME, *files_of_machines(run.directory)]
    sent = 0
    try:
        if not run.described:
            with run.part(TrackedRun.file):
                _describe(run)
                run.described = True
        for file in files:
            with run.part(name := str(file.relative_to(run.directory))):
                sent += _feed_rows(run, name)
        with run.part(ARTIFACTS_DIRECTORY):
            _upload_files(run)
        if ended:
            with run.part("the end of the run"):
                end = int((run.description.ended or time.time()) * 1000)
                run.client.set_terminated(run.state.run_id, run.description.status, end_time=end)
    finally:
        run.report()
    if run.unsent:
        name, error = run.unsent[0]
        raise FailedError(f"{name}: {one_line(error)}") from error
    return sent


def _experiment(mlflow_client: MlflowClient, name: str, database: Path | None) -> str:
    """The id of the experiment `name`, which is created if MLflow lacks it. Raises DeletedError."""
    experiment = mlflow_client.get_experiment_by_name(name)
    if experiment is not None and experiment.lifecycle_stage != "active":
        raise DeletedError(
            f"the experiment {name!r} is deleted there; to restore it: MLFLOW_TRACKING_URI="
            f"{masked(mlflow_client.tracking_uri)} mlflow experiments restore -x {experiment.experiment_id}"
        )
    if experiment is not None:
        return experiment.experiment_id
    # a server has a place for artifacts; with a sqlite file, artifacts would land in the working directory
    location = (database.parent / ARTIFACTS / safe_key(name, _FOLDER_LENGTH)).as_uri() if database else None
    try:
        return mlflow_client.create_experiment(name, location, _EXPERIMENT_TAGS)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # created by a run that started at the same time
            raise
        return mlflow_client.get_experiment_by_name(name).experiment_id


def _describe(run: MlflowRun) -> None:
    """Sends parameters, tags and datasets. MLflow never changes a parameter, so a changed value becomes a tag."""
    description, run_id = run.description, run.state.run_id
    data, directory = run.client.get_run(run_id).data, printable(str(run.directory.resolve()))
    run.client.update_run(run_id, status="RUNNING", name=description.run_name[:KEY_LENGTH])
    _end_the_dead(run, directory)
    known, parameters = data.params, flatten(description.parameters)
    tags = {**resolve_tags(), "mlflow.source.name": "pretrain train"}
    tags |= {"attempts": str(description.attempt), _DIRECTORY: directory}
    if run.parent:
        tags["mlflow.parentRunId"] = run.parent
    for key in parameters.keys() & known.keys():
        if parameters[key] != known[key]:
            tags[f"changed.{key}"] = f"{known[key]} → {parameters[key]} (attempt {description.attempt})"
    tags |= {key: value for key, value in description.tags.items() if key != NOTE or NOTE not in data.tags}
    params = [Param(key, value) for key, value in parameters.items() if key not in known]
    run.send("parameter", params, lambda some: run.client.log_batch(run_id, params=some))
    labels = [RunTag(safe_key(key), str(value)) for key, value in tags.items()]
    run.send("tag", labels, lambda some: run.client.log_batch(run_id, tags=some))
    for info in description.datasets:
        source, profile = json.dumps({"uri": info.source}), json.dumps(info.profile)
        dataset = Dataset(**info.in_mlflow, source_type="local", source=source, profile=profile)
        with run.part(f"corpus {info.name}"):
            run.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", info.context)])])


def _end_the_dead(run: MlflowRun, directory: str) -> None:
    """Ends the other runs of this directory that are running according to MLflow. They have died, since this run trains
    there.

    A path is the same directory only on the same host. Runs that were renamed to RUN.old-N are found by their keys.
    """
    old = run.directory.parent.glob(f"{glob.escape(run.directory.name)}.old-*")
    aside = {one.key for path in old if (one := TrackedRun.load(path)) and one.ended}
    for other in run.client.search_runs([run.state.experiment_id], "attributes.status = 'RUNNING'"):
        tags = other.data.tags
        here = tags.get(_DIRECTORY) == directory and tags.get(HOST) == run.description.tags.get(HOST)
        if other.info.run_id != run.state.run_id and (here or tags.get(_RUN_KEY) in aside):
            losses = run.client.get_metric_history(other.info.run_id, in_mlflow("train/loss"))
            end = max((point.timestamp for point in losses), default=other.info.start_time)
            run.client.set_terminated(other.info.run_id, "FAILED", end_time=end)


def _feed_rows(run: MlflowRun, name: str) -> int:
    """Sends the new rows of a file of metrics. Returns the number of metrics that MLflow has taken."""
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
        sent += run.send("metric", metrics, lambda some: run.client.log_batch(run.state.run_id, metrics=some))
        _, run.state.offsets[name] = batch[-1]
        run.save()
    return sent


def _upload_files(run: MlflowRun) -> None:
    """Uploads new and changed files. A changed file replaces the earlier one; a changed image is added to it."""
    for name in run.description.artifacts:
        _upload(run, run.directory / name, PurePosixPath(name))
    directory = run.directory / ARTIFACTS_DIRECTORY
    for path in sorted(directory.rglob("*")):
        if run.failing:
            return
        _upload(run, path, PurePosixPath(path.relative_to(directory)))


def _upload(run: MlflowRun, path: Path, target: PurePosixPath) -> None:
    """Uploads a file to the path `target` of the run's artifacts, if the file is new or has changed."""
    name = printable(str(path.relative_to(run.directory)))
    if not path.is_file() or path.name.endswith(TEMPORARY_SUFFIX):
        return
    version = file_version(path)
    if version in (run.state.files.get(name), run.aside.get(name)):
        return
    with run.part(name, version):
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
