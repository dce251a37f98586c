"""Feeds MLflow from a run directory.

RUN/tracking.json       the description of the run for MLflow (TrackedRun)
RUN/mlflow.json         how far MLflow has been fed (FeedState); a resumed run continues the same MLflow run, a copy of
                        a run directory gets a new one
RUN/metrics.jsonl       the metrics
RUN/artifacts/          every file here is uploaded, under its own path; evaluation/NAME.json is a table there
Feeding again is safe: MLflow keeps equal points (name, step, time, value) once.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking.context.registry import resolve_tags

from data_pipeline.base.atomic import TEMPORARY_SUFFIX
from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import masked, printable
from pretrain.engine.checkpoint import CONFIG
from pretrain.run import ARTIFACTS_DIRECTORY, environment, metrics_file
from pretrain.training.tracking.mlflow_store import (
    NOTE,
    FeedState,
    TrackedRun,
    absolute_uri,
    client,
    create_tables,
    one_line,
    sqlite_file,
)

# with this tag, the UI opens an experiment on its training runs, not on its pages for language-model calls
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
_RUN_KEY = "run_key"  # a tag
_ROWS_AT_ONCE = 100
_KEY_LENGTH = 250  # MLflow's limit


class Feeder:
    """The run of a run directory in MLflow, which is found there or created.

    Methods raise all errors of MLflow. Calling them again continues.
    """

    def __init__(self, run_dir: Path, run: TrackedRun, uri: str):
        uri = absolute_uri(uri)
        create_tables(uri)
        self._directory, self._run, self._client = run_dir, run, client(uri)
        experiment_id = self._experiment(sqlite_file(uri))
        found = self._client.search_runs([experiment_id], f"tags.{_RUN_KEY} = '{run.key}'", max_results=1)
        (opened,) = found or [self._client.create_run(experiment_id, int(run.started * 1000), {_RUN_KEY: run.key})]
        self._state, before = FeedState(masked(uri), experiment_id, opened.info.run_id), FeedState.load(run_dir)
        if before and (before.tracking_uri, before.run_id) == (self._state.tracking_uri, self._state.run_id):
            self._state = before
        self._described = False
        self._save()

    def feed(self) -> int:
        """Sends new metrics, the description, the end of the run, and new files. Returns the number of metrics sent.

        If files can't be sent, the others are sent, and FailedError is raised with the first of them.
        """
        sent = self._send_metrics()
        if not self._described:
            self._describe()
            self._described = True
        if self._run.status != "RUNNING":
            end = self._run.ended and int(self._run.ended * 1000)
            self._client.set_terminated(self._state.run_id, self._run.status, end_time=end)
        self._send_files()
        return sent

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # what was sent may be sent again, which is harmless
            self._state.save(self._directory)

    def _experiment(self, database: Path | None) -> str:
        """The id of the run's experiment, which is created if MLflow lacks it."""
        name = self._run.experiment
        if experiment := self._client.get_experiment_by_name(name):
            return experiment.experiment_id
        # a server has a place for artifacts; with a sqlite file, artifacts would land in the working directory
        location = (database.parent / "mlartifacts").as_uri() if database else None
        try:
            return self._client.create_experiment(name, location, _EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # created by a run that started at the same time
                raise
            return self._client.get_experiment_by_name(name).experiment_id

    def _describe(self) -> None:
        """Sends parameters and tags. MLflow never changes a parameter, so a changed value becomes a tag."""
        run, run_id = self._run, self._state.run_id
        data, parameters = self._client.get_run(run_id).data, flatten(run.parameters)
        self._client.update_run(run_id, status="RUNNING", name=run.run_name)
        tags = {**resolve_tags(), "mlflow.source.name": "pretrain train"}
        tags |= {"attempts": str(run.attempt), "run_directory": printable(str(self._directory.resolve()))}
        for key in parameters.keys() & data.params.keys():
            if parameters[key] != data.params[key]:
                tags[safe_key(f"changed.{key}")] = f"{data.params[key]} → {parameters[key]} (attempt {run.attempt})"
        tags |= {key: value for key, value in run.tags.items() if key != NOTE or NOTE not in data.tags}
        params = [Param(key, value) for key, value in parameters.items() if key not in data.params]
        self._client.log_batch(run_id, params=params, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def _send_metrics(self) -> int:
        """Sends the new rows of metrics.jsonl. Returns the number of metrics."""
        sent, rows = 0, metrics_file.rows_from(self._directory / metrics_file.FILE_NAME, self._state.offset)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            metrics = [
                Metric(safe_key(name), value, int(row.time * 1000), row.step)
                for row, _ in batch
                for name, value in row.metrics.items()
            ]
            self._client.log_batch(self._state.run_id, metrics=metrics)
            sent += len(metrics)
            _, self._state.offset = batch[-1]
            self._save()
        return sent

    def _send_files(self) -> None:
        """Uploads new and changed files."""
        described_by = [self._directory / name for name in (CONFIG, "environment.json", environment.DIFF)]
        failures = []
        for path in [*described_by, *sorted((self._directory / ARTIFACTS_DIRECTORY).rglob("*"))]:
            if not path.is_file() or path.name.endswith(TEMPORARY_SUFFIX):
                continue
            name, stat = printable(str(path.relative_to(self._directory))), path.stat()
            version = [stat.st_mtime_ns, stat.st_size]
            if version == self._state.files.get(name):
                continue
            try:
                self._upload(path)
            except Exception as error:  # of MLflow, the connection, the place for artifacts or the file
                failures.append((name, error))
                continue
            self._state.files[name] = version
            self._save()
        if failures:
            name, first = failures[0]
            raise FailedError(f"{name}: {one_line(first)}") from first

    def _upload(self, path: Path) -> None:
        run_id, artifacts = self._state.run_id, self._directory / ARTIFACTS_DIRECTORY
        folder = path.parent.relative_to(artifacts if path.is_relative_to(artifacts) else self._directory)
        self._client.log_artifact(run_id, str(path), "/".join(folder.parts) or None)
        if folder.parts[:1] == ("evaluation",) and path.suffix == ".json":
            tables = sorted(path.relative_to(artifacts) for path in artifacts.glob("evaluation/**/*.json"))
            listed = [{"path": str(table), "type": "table"} for table in tables]
            self._client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(listed))


def safe_key(name: str) -> str:
    """A name as MLflow takes it: without unusual characters and empty or dotted parts, not longer than 250 characters.

    >>> safe_key("loss [en]")
    'loss _en_'
    """
    parts = re.sub(r"[^/\w.\- :]", "_", name)[:_KEY_LENGTH].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


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
            flat[safe_key(name)] = str(value)
    return flat
