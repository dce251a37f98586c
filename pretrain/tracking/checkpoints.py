"""Checkpoints as MLflow's logged models, with the metrics of their steps, so that a search ranks them.

    mlflow.search_logged_models(
        experiment_ids=["1"],
        filter_string="tags.checkpoint = 'kept'",
        order_by=[{"field_name": "metrics.loss/validation.c4", "ascending": True}],
    )

The weights stay where they are: the tag `directory` says where. A checkpoint that is deleted keeps its model,
whose tag `checkpoint` then says `deleted`.
"""

import math
from collections.abc import Iterator
from typing import Any

from data_pipeline.foundation.atomic import sha256
from pretrain.checkpoint.directory import all_steps, checkpoint_directory
from pretrain.checkpoint.index import INDEX
from pretrain.run import metrics_file
from pretrain.tracking.metric_points import RepeatedSteps, in_mlflow
from pretrain.tracking.mlflow_run import LoggedCheckpoint, MlflowRun, TrackedRun, file_version
from pretrain.tracking.store import DIGEST_LENGTH, METRICS_PER_BATCH

_KEY = "checkpoint_key"
_STATE = "checkpoint"
_NOT_ABOUT_THE_MODEL = ("train/", "checkpoint/", "evaluation/")  # but train/loss is


def log_checkpoints(run: MlflowRun) -> None:
    """Logs new checkpoints, and marks those that were deleted since the last call."""
    if not (run.directory / "checkpoints").is_dir():  # the run directory was copied without them
        return
    present = set()
    for step in all_steps(run.directory):
        name, index = checkpoint_directory(run.directory, step).name, checkpoint_directory(run.directory, step) / INDEX
        try:
            version = file_version(index)
            known = run.state.checkpoints.get(name)
            if known is None or known.version != version:
                # the index holds the checksum of every other file
                _log(run, step, f"{run.description.key}/{sha256(index)}", version)
        except FileNotFoundError:  # just deleted
            continue
        present.add(name)
    for name, known in run.state.checkpoints.items():
        if name not in present and known.version is not None:
            run.client.set_logged_model_tags(known.model_id, {_STATE: "deleted"})
            known.version = None
            run.save()


def _log(run: MlflowRun, step: int, key: str, version: list[int]) -> None:
    directory, state = checkpoint_directory(run.directory, step), run.state
    found = run.client.search_logged_models([state.experiment_id], f"tags.{_KEY} = '{key}'", max_results=1)
    name = f"{run.description.run_name}-step-{step:08d}"
    model_id = found[0].model_id if found else create_model(run, name, step, "checkpoint", {_KEY: key})
    run.add_output(model_id, step)
    before = state.checkpoints.get(directory.name)
    if before and before.model_id != model_id:  # another attempt has overwritten it
        run.client.set_logged_model_tags(before.model_id, {_STATE: "deleted"})
    run.client.set_logged_model_tags(model_id, {_STATE: "kept", "directory": str(directory.resolve())})
    log_metrics(run, model_id, step)
    run.client.finalize_logged_model(model_id, "READY")
    state.checkpoints[directory.name] = LoggedCheckpoint(model_id, version)
    run.save()


def create_model(run: MlflowRun, name: str, step: int, kind: str, tags: dict[str, str] | None = None) -> str:
    """The id of a new logged model of the run."""
    name = "".join("_" if character in "/:.%\"'" else character for character in name)  # which MLflow refuses
    parameters = {"step": str(step), "family": run.description.family}
    return run.client.create_logged_model(
        run.state.experiment_id, name, run.state.run_id, tags=tags, params=parameters, model_type=kind
    ).model_id


def log_metrics(run: MlflowRun, model_id: str, step: int) -> None:
    """Gives a model the metrics of `step`, each with the corpus that it was measured on.

    They are the points that the run has in MLflow, which therefore keeps them once.
    """
    metrics = list(_metrics(run, model_id, step))
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        run.client.log_batch(run.state.run_id, metrics=metrics[start : start + METRICS_PER_BATCH])


def _metrics(run: MlflowRun, model_id: str, step: int) -> Iterator[Any]:
    from mlflow.entities import Metric  # mlflow takes a second to import

    rows = list(metrics_file.rows_of_step(run.directory / metrics_file.FILE_NAME, step))
    repeated = RepeatedSteps(lambda: iter(rows))
    sent: dict[str, tuple[float, float]] = {}
    for row in rows:
        sent |= {name: (value, row.time) for name, value in repeated.new_metrics(row).items()}
    for name, (value, time) in sent.items():
        about_the_model = name == "train/loss" or not name.startswith(_NOT_ABOUT_THE_MODEL)
        if about_the_model and math.isfinite(value):  # MLflow would turn NaN into 0, the best of losses
            dataset = metric_dataset(run.description, name)
            yield Metric(in_mlflow(name), value, int(time * 1000), step, model_id=model_id, **dataset)


def metric_dataset(run: TrackedRun, metric: str) -> dict[str, str]:
    """The corpus that a metric was measured on; nothing for a mixture, or if it isn't known."""
    context = "train" if metric == "train/loss" else "validation"
    measured_on = [
        (name, info)
        for name, info in run.named_datasets()
        if info.context == context and (context == "train" or metric.startswith(f"validation/{info.name}/"))
    ]
    if len(measured_on) != 1:
        return {}
    ((name, info),) = measured_on
    return {"dataset_name": name, "dataset_digest": info.digest[:DIGEST_LENGTH]}
