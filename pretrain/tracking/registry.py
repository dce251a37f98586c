"""Registers an exported model in MLflow."""

import os
from dataclasses import dataclass
from pathlib import Path

import mlflow

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import MASK, masked
from pretrain.tracking.mlflow_run import STATE_FILE, FeedState
from pretrain.tracking.store import absolute_uri, one_line


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
        if state is None or checkpoint.name not in state.checkpoints:
            raise UserError(f"--register: {run_dir / STATE_FILE} has no model of {checkpoint}; sync the run first")
        given = absolute_uri(uri) if uri else None
        if given and masked(given) != state.tracking_uri:
            raise UserError(f"--uri: the run is in {state.tracking_uri}; for another MLflow: pretrain sync {run_dir}")
        if not given and MASK in state.tracking_uri:
            raise UserError(f"--register: the password of {state.tracking_uri} isn't recorded; give --uri with it")
        return cls(name, given or state.tracking_uri, state.checkpoints[checkpoint.name].model_id)

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
