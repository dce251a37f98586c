"""Registers an exported model in MLflow, so that `mlflow models serve` and `mlflow.pyfunc.load_model` find it."""

import logging
import os
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.secrets import MASK, masked
from pretrain.checkpoint.directory import step_in_name
from pretrain.tracking.checkpoints import create_model, log_metrics
from pretrain.tracking.mlflow_run import STATE_FILE, FeedState, MlflowRun, TrackedRun
from pretrain.tracking.store import NO_TELEMETRY, absolute_uri, one_line

_CODE = Path(__file__).with_name("served_model.py")
_REQUIREMENTS = ("torch", "transformers", "sentencepiece", "tokenizers", "safetensors", "protobuf")


@dataclass(frozen=True)
class Registration:
    """A model to register as `name`: the one saved at `step` of a run that MLflow has."""

    name: str
    uri: str
    run_dir: Path
    run: TrackedRun
    state: FeedState
    step: int

    @classmethod
    def of(cls, checkpoint: Path, name: str, uri: str | None = None) -> "Registration":
        """Raises UserError for a name that MLflow refuses, and if the checkpoint's run isn't in MLflow."""
        run_dir, step = checkpoint.resolve().parent.parent, step_in_name(checkpoint.name)
        run, state = TrackedRun.load(run_dir), FeedState.load(run_dir)
        if not name.strip() or "/" in name or ":" in name:
            raise UserError(f"--register: expected a name without / and :, got {name!r}")
        if step is None or run is None or state is None:
            raise UserError(
                f"--register: {checkpoint}: MLflow has no run of it ({run_dir / STATE_FILE}); sync it first"
            )
        given = absolute_uri(uri) if uri else None
        if given and masked(given) != state.tracking_uri:
            raise UserError(f"--uri: the run is in {state.tracking_uri}; for another MLflow: pretrain sync {run_dir}")
        if not given and MASK in state.tracking_uri:
            raise UserError(f"--register: the password of {state.tracking_uri} isn't recorded; give --uri with it")
        return cls(name, given or state.tracking_uri, run_dir, run, state, step)

    def register(self, exported: Path) -> str:
        """Registers the model that was exported to `exported`; returns its URI, models:/NAME/VERSION.

        Raises FailedError if MLflow can't take it.
        """
        os.environ.update({**NO_TELEMETRY, "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"})
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        try:
            # MLflow misses type hints and an example, which the model would have to answer here
            with warnings.catch_warnings(record=True):
                number = self._version(exported)
        except Exception as error:  # of MLflow, of its database or of its files
            raise FailedError(f"{masked(self.uri)}: {self.name} isn't registered: {one_line(error)}") from error
        return f"models:/{self.name}/{number}"

    def _version(self, exported: Path) -> str:
        import mlflow  # mlflow takes a second to import
        from mlflow.exceptions import MlflowException

        mlflow.set_tracking_uri(self.uri)
        mlflow.set_registry_uri(self.uri)
        client = mlflow.MlflowClient()
        model_id = self._logged(MlflowRun(client, self.run_dir, self.run, self.state), exported)
        try:
            client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model_id}"
        return str(client.create_model_version(self.name, source, self.state.run_id, model_id=model_id).version)

    def _logged(self, run: MlflowRun, exported: Path) -> str:
        """The id of a logged model with the files of `exported` and the metrics of the checkpoint."""
        model_id = create_model(run, self.name, self.step, "export")
        with tempfile.TemporaryDirectory(dir=exported.parent, prefix=".") as folder:
            save(exported, Path(folder) / "model", run_id=self.state.run_id, model_id=model_id)
            run.client.log_model_artifacts(model_id, str(Path(folder) / "model"))
        run.add_output(model_id, self.step)
        log_metrics(run, model_id, self.step)
        run.client.finalize_logged_model(model_id, "READY")
        return model_id


def save(exported: Path, out: Path, **identity: str) -> None:
    """Writes an MLflow model that answers texts with the transformers model in `exported`. Nothing is pickled."""
    import mlflow.pyfunc  # mlflow takes a second to import
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string")]),
        outputs=Schema([ColSpec("string")]),
        params=ParamSchema(
            [
                ParamSpec("max_new_tokens", "long", 128),
                ParamSpec("num_beams", "long", 1),
                ParamSpec("do_sample", "boolean", False),
                ParamSpec("temperature", "double", 1.0),
                ParamSpec("top_p", "double", 1.0),
            ]
        ),
    )
    mlflow.pyfunc.save_model(
        out,
        python_model=str(_CODE),
        artifacts={"model": str(exported)},
        signature=signature,
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _REQUIREMENTS],
        mlflow_model=Model(artifact_path="model", **identity),
    )
