"""Checkpoints as MLflow's logged models, with the metrics of their steps, so that a search ranks them.

    mlflow.search_logged_models(
        experiment_ids=["1"],
        filter_string="tags.checkpoint = 'kept'",
        order_by=[{"field_name": "metrics.loss/validation.c4", "ascending": True}],
    )

The weights stay where they are: the tag `directory` names the place. A checkpoint that is deleted keeps its model,
whose tag `checkpoint` then says `deleted`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.foundation.atomic import sha256
from pretrain.checkpoint.directory import all_steps, directory_of
from pretrain.checkpoint.index import INDEX
from pretrain.run import metrics_file as metric_log
from pretrain.tracking.names import in_mlflow
from pretrain.tracking.replays import Replays
from pretrain.tracking.state import FeedState, LoggedCheckpoint
from pretrain.tracking.store import DIGEST_LENGTH, METRICS_PER_BATCH
from pretrain.tracking.tracked_run import TrackedRun

_KEY = "checkpoint_key"
_STATE = "checkpoint"
_NOT_ABOUT_THE_MODEL = ("train/", "checkpoint/", "evaluation/")  # but train/loss is


def log_checkpoints(client: Any, run_dir: Path, run: TrackedRun, state: FeedState) -> None:
    """Logs new checkpoints, and marks those that were deleted since the last call."""
    if not (run_dir / "checkpoints").is_dir():  # the run directory was copied without them
        return
    present = set()
    for step in all_steps(run_dir):
        directory = directory_of(run_dir, step)
        try:
            stat = (directory / INDEX).stat()
            version = [stat.st_mtime_ns, stat.st_size]
            known = state.checkpoints.get(directory.name)
            if known is None or known.version != version:
                key = f"{run.key}/{sha256(directory / INDEX)}"  # the index holds the checksum of every other file
                _log(client, run_dir, run, state, step, key, version)
        except FileNotFoundError:  # just deleted
            continue
        present.add(directory.name)
    for name, known in state.checkpoints.items():
        if name not in present and known.version is not None:
            client.set_logged_model_tags(known.model_id, {_STATE: "deleted"})
            known.version = None
            state.save(run_dir)


def _log(
    client: Any, run_dir: Path, run: TrackedRun, state: FeedState, step: int, key: str, version: list[int]
) -> None:
    directory = directory_of(run_dir, step)
    model_id = _model(client, run, state, step, key)
    before = state.checkpoints.get(directory.name)
    if before and before.model_id != model_id:  # another attempt has overwritten it
        client.set_logged_model_tags(before.model_id, {_STATE: "deleted"})
    client.set_logged_model_tags(model_id, {_STATE: "kept", "directory": str(directory.resolve())})
    log_metrics(client, run_dir, run, state, model_id, step)
    client.finalize_logged_model(model_id, "READY")
    state.checkpoints[directory.name] = LoggedCheckpoint(model_id, version)
    state.save(run_dir)


def _model(client: Any, run: TrackedRun, state: FeedState, step: int, key: str) -> str:
    """The id of the checkpoint's model: found by its key, or new."""
    found = client.search_logged_models([state.experiment_id], f"tags.{_KEY} = '{key}'", max_results=1)
    if found:
        model_id = found[0].model_id
    else:
        name = f"{model_name(run.run_name)}-step-{step:08d}"
        parameters = {"step": str(step), "family": str(run.parameters.get("model", {}).get("family", ""))}
        model_id = client.create_logged_model(
            state.experiment_id, name, state.run_id, tags={_KEY: key}, params=parameters, model_type="checkpoint"
        ).model_id
    link(client, state, model_id, step)
    return model_id


def link(client: Any, state: FeedState, model_id: str, step: int) -> None:
    """Makes the model an output of the run, once."""
    from mlflow.entities import LoggedModelOutput

    outputs = client.get_run(state.run_id).outputs
    if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        client.log_outputs(state.run_id, [LoggedModelOutput(model_id, step)])


def log_metrics(client: Any, run_dir: Path, run: TrackedRun, state: FeedState, model_id: str, step: int) -> None:
    """Gives a model the metrics of `step`, each with the corpus that it was measured on.

    They are the points that the run has in MLflow, so it takes none of them for a new one.
    """
    metrics = list(_metrics(run_dir / metric_log.FILE_NAME, run, model_id, step))
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(state.run_id, metrics=metrics[start : start + METRICS_PER_BATCH])


def _metrics(path: Path, run: TrackedRun, model_id: str, step: int) -> Iterator[Any]:
    from mlflow.entities import Metric

    replays = Replays(lambda: ((row, 0) for row in metric_log.rows_of_step(path, step)))
    sent: dict[str, tuple[float, float]] = {}
    for row in metric_log.rows_of_step(path, step):
        sent |= {name: (value, row.time) for name, value in replays.unsent(row).items()}
    for name, (value, time) in sent.items():
        about_the_model = name == "train/loss" or not name.startswith(_NOT_ABOUT_THE_MODEL)
        if about_the_model and math.isfinite(value):  # MLflow would turn NaN into 0, the best of losses
            dataset = _dataset(run, name)
            yield Metric(in_mlflow(name), value, int(time * 1000), step, model_id=model_id, **dataset)


def _dataset(run: TrackedRun, metric: str) -> dict[str, str]:
    """The corpus that a metric was measured on; nothing for a mixture, or if it isn't known."""
    datasets = list(run.named_datasets())
    if metric == "train/loss":
        on = [(name, info) for name, info in datasets if info.context == "train"]
    else:
        of_corpus = [(name, info) for name, info in datasets if metric.startswith(f"validation/{info.name}/")]
        on = [(name, info) for name, info in of_corpus if info.context == "validation"]
    if len(on) != 1:
        return {}
    (name, info), *_ = on
    return {"dataset_name": name, "dataset_digest": info.digest[:DIGEST_LENGTH]}


def model_name(name: str) -> str:
    """`name` without the characters that MLflow refuses in the name of a model."""
    return "".join("_" if character in "/:.%\"'" else character for character in name)
