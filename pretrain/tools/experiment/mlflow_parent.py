"""The parent run of an experiment or a ladder in MLflow: it gets the table and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.foundation.secrets import masked
from pretrain.tools.experiment.planned_runs import PlannedRun
from pretrain.tracking.parent_runs import parent_run, settle_parent
from pretrain.tracking.store import client, one_line
from pretrain.tracking.tracker import sync


def log(runs: Sequence[PlannedRun], losses: Mapping[str, float], files: Sequence[Path]) -> str | None:
    """Logs `files` and the mean validation losses of rows to the parent of `runs`, in each MLflow that they use.

    Returns what went wrong, in a line: an MLflow that is away ends nothing.
    """
    stores = {(mlflow.uri, mlflow.experiment, mlflow.parent) for run in runs if (mlflow := run.config.tracking.mlflow)}
    problems = []
    for uri, experiment, parent in sorted(stores):
        try:
            for run in runs:
                if run.finished and run.config.tracking.mlflow and run.config.tracking.mlflow.uri == uri:
                    sync(run.directory, uri)  # sends what MLflow was too slow to take when the run ended
            store = client(uri)
            found = store.get_experiment_by_name(experiment)
            if found is None or parent is None:
                continue  # none of the runs has reached MLflow
            run_id = parent_run(store, found.experiment_id, parent)
            for file in files:
                store.log_artifact(run_id, str(file))
            for row, loss in losses.items():
                store.log_metric(run_id, f"{row}/validation_loss", loss)
            settle_parent(store, found.experiment_id, run_id)
        except Exception as error:  # MLflow's errors are of many kinds
            problems.append(f"MLflow at {masked(uri)}: {one_line(error)}; the table isn't there")
    return "; ".join(problems) or None
