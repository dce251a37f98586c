"""Checkpoints as MLflow's logged models, with the metrics of their steps, so that a search ranks them.

    mlflow.search_logged_models(
        experiment_ids=["1"],
        filter_string="tags.checkpoint = 'kept'",
        order_by=[{"field_name": "metrics.loss/validation.c4", "ascending": True}],
    )

The weights stay where they are: the tag `directory` says where. A checkpoint that is deleted keeps its model,
whose tag `checkpoint` then says `deleted`. An export of one is a model of its own, which is uploaded and registered.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.exceptions import MlflowException

from data_pipeline.foundation.atomic import sha256
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import masked, printable
from pretrain.engine.checkpoint.directory import all_steps, checkpoint_directory
from pretrain.engine.checkpoint.index import INDEX
from pretrain.run import metrics_file
from pretrain.training.tracking.mlflow_store import (
    KEY_LENGTH,
    FeedState,
    MlflowRun,
    TrackedRun,
    absolute_uri,
    file_version,
    in_mlflow,
    is_missing,
    one_line,
    with_password,
)

_KEY = "checkpoint_key"
_STATE = "checkpoint"
_NOT_ABOUT_THE_MODEL = ("train/", "checkpoint/", "evaluation/")  # but train/loss is


def log_checkpoints(run: MlflowRun) -> None:
    """Logs new checkpoints, and marks those that were deleted since the last call."""
    if not (run.directory / "checkpoints").is_dir():  # the run directory was copied without them
        return
    state, present = run.state, set()
    for step in all_steps(run.directory):
        directory = checkpoint_directory(run.directory, step)
        name = _index(directory.name)
        try:
            version = file_version(directory / INDEX)
            new = version not in (state.files.get(name), run.aside.get(name))
            # the index holds the checksum of every other file
            key = f"{run.description.key}/{sha256(directory / INDEX)}" if new else ""
        except FileNotFoundError:  # just deleted
            continue
        present.add(directory.name)
        if new and not run.failing:
            with run.part(name, version):
                _log(run, step, key)
                state.files[name] = version
                run.save()
    for name in state.models.keys() - present:
        with run.part(_index(name)):
            _mark_deleted(run, state.models[name])
            del state.models[name], state.files[_index(name)]
            run.save()


def _mark_deleted(run: MlflowRun, model_id: str) -> None:
    try:
        run.client.set_logged_model_tags(model_id, {_STATE: "deleted"})
    except MlflowException as error:
        if not is_missing(error):  # someone has deleted the model in MLflow too
            raise


def _index(name: str) -> str:
    return f"checkpoints/{name}/{INDEX}"


def _log(run: MlflowRun, step: int, key: str) -> None:
    directory = checkpoint_directory(run.directory, step)
    state, client = run.state, run.client
    found = client.search_logged_models([state.experiment_id], f"tags.{_KEY} = '{key}'", max_results=1)
    model = found[0] if found else _new_model(run, step, key)
    model_id = model.model_id
    outputs = client.get_run(state.run_id).outputs
    if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        client.log_outputs(state.run_id, [LoggedModelOutput(model_id, step)])
    before = state.models.get(directory.name)
    if before and before != model_id:  # another attempt has overwritten it
        _mark_deleted(run, before)
    client.set_logged_model_tags(model_id, {_STATE: "kept", "directory": printable(str(directory.resolve()))})
    metrics = _metrics(run, model, step)
    run.send(f"{directory.name}'s metric", metrics, lambda some: client.log_batch(state.run_id, metrics=some))
    client.finalize_logged_model(model_id, "READY")
    state.models[directory.name] = model_id


def _new_model(run: MlflowRun, step: int, key: str) -> LoggedModel:
    """A new logged model of the run."""
    name = re.sub(r"[/:.%\"']", "_", f"{run.description.run_name[:KEY_LENGTH]}-step-{step:08d}")  # which MLflow refuses
    family = str(run.description.parameters.get("model", {}).get("family", ""))
    return run.client.create_logged_model(
        run.state.experiment_id,
        name,
        run.state.run_id,
        tags={_KEY: key},
        params={"step": str(step), "family": family},
        model_type="checkpoint",
    )


def _metrics(run: MlflowRun, model: LoggedModel, step: int) -> list[Metric]:
    """The metrics of `step` that the model lacks, each with the corpus that it was measured on.

    They are the points that the run has in MLflow, which therefore keeps them once. A point that the model has of
    another corpus, as after a copied run directory got another validation set, is set aside: MLflow takes no second.
    """
    latest: dict[str, tuple[float, int]] = {}
    for row in metrics_file.rows_of_step(run.directory / metrics_file.FILE_NAME, step):
        latest |= {name: (value, int(row.time * 1000)) for name, value in row.metrics.items()}
    metrics = [
        Metric(in_mlflow(name), value, time, step, model_id=model.model_id, **metric_dataset(run.description, name))
        for name, (value, time) in latest.items()
        if name == "train/loss" or not name.startswith(_NOT_ABOUT_THE_MODEL)
        if math.isfinite(value)  # MLflow would turn NaN into 0, the best of losses
    ]
    there = {(one.key, one.timestamp): one for one in model.metrics or [] if one.run_id == run.state.run_id}
    lacking = []
    for metric in metrics:
        other = there.get((metric.key, metric.timestamp))
        if other is None:
            lacking.append(metric)
        elif (other.dataset_name, other.dataset_digest) != (metric.dataset_name, metric.dataset_digest):
            name = f"{checkpoint_directory(run.directory, step).name}'s metric {metric.key}"
            run.set_aside(name, f"MLflow has it of another corpus, {other.dataset_name} {other.dataset_digest}")
    return lacking


def metric_dataset(run: TrackedRun, metric: str) -> dict[str, str]:
    """The corpus that a metric was measured on; nothing for a mixture, or if it isn't known."""
    if metric == "train/loss":
        found = [one for one in run.datasets if one.context == "train"]
    else:
        validation = [one for one in run.datasets if one.context == "validation"]
        found = [one for one in validation if metric.startswith(f"validation/{one.name}/")]
    return {f"dataset_{key}": value for key, value in found[0].in_mlflow.items()} if len(found) == 1 else {}


@dataclass(frozen=True)
class Registration:
    """An export of the checkpoint that MLflow has as `model_id`, to be registered as `name`."""

    name: str
    uri: str
    model_id: str

    @classmethod
    def of(cls, checkpoint: Path, name: str, uri: str | None = None) -> "Registration":
        """Raises UserError for a name that MLflow refuses, and if the checkpoint isn't in MLflow."""
        checkpoint = checkpoint.resolve()
        run_dir = checkpoint.parent.parent
        if not name.strip() or "/" in name or ":" in name:
            raise UserError(f"--register: expected a name without / and :, got {name!r}")
        state = FeedState.load(run_dir)
        if state is None or checkpoint.name not in state.models:
            raise UserError(f"--register: {run_dir / FeedState.file} has no model of {checkpoint}; sync the run first")
        if uri and masked(absolute_uri(uri)) != state.tracking_uri:
            raise UserError(f"--uri: the run is in {state.tracking_uri}; for another MLflow: pretrain sync {run_dir}")
        return cls(name, with_password(state.tracking_uri, uri), state.models[checkpoint.name])

    def register(self, exported: Path) -> str:
        """Uploads the directory `exported` and registers it; returns its URI, models:/NAME/VERSION.

        Raises FailedError if MLflow can't take it.
        """
        os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
        mlflow.set_tracking_uri(self.uri)
        mlflow.set_registry_uri(self.uri)
        client = mlflow.MlflowClient()
        try:
            checkpoint = client.get_logged_model(self.model_id)
            model = client.create_logged_model(
                checkpoint.experiment_id,
                f"{checkpoint.name}-export",
                checkpoint.source_run_id,
                params=checkpoint.params,
                model_type="export",
            )
            client.log_model_artifacts(model.model_id, str(exported))
            client.finalize_logged_model(model.model_id, "READY")
            version = mlflow.register_model(f"models:/{model.model_id}", self.name).version
        except Exception as error:  # of MLflow, of its database or of its files
            raise FailedError(f"{masked(self.uri)}: {self.name} isn't registered: {one_line(error)}") from error
        return f"models:/{self.name}/{version}"
