"""The files of a run that MLflow gets: artifacts, tables and images.

RUN/artifacts/evaluation/NAME.json                 a table: MLflow's UI lists it as one
RUN/artifacts/evaluation/NAME/step-00001000.png    an image pictures/NAME of a step: the UI has a slider over the steps
RUN/artifacts/…                                    any other file, under its own path
"""

import json
import re
from pathlib import Path, PurePosixPath

import mlflow

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX
from pretrain.tracking.mlflow_run import ARTIFACTS_DIRECTORY, MlflowRun, file_version

_STEP = re.compile(r"step-(\d+)\.png")
_TABLE = re.compile(rf"{ARTIFACTS_DIRECTORY}/evaluation/.+\.json")


def upload_files(run: MlflowRun) -> None:
    """Uploads what is new or has changed. A file that is uploaded again replaces the earlier one; an image joins it."""
    for name in run.description.artifacts:
        _upload(run, run.directory / name, name, PurePosixPath(name))
    directory = run.directory / ARTIFACTS_DIRECTORY
    for path in sorted(directory.rglob("*")):
        if not path.name.endswith(TEMPORARY_SUFFIX):
            target = PurePosixPath(path.relative_to(directory))
            _upload(run, path, str(path.relative_to(run.directory)), target)


def _upload(run: MlflowRun, path: Path, name: str, target: PurePosixPath) -> None:
    """Uploads a file, `name` in FeedState.files, to the path `target` of the run's artifacts."""
    if not path.is_file() or run.state.files.get(name) == (version := file_version(path)):
        return
    if found := _STEP.fullmatch(target.name):
        key = "/".join(["pictures", *target.parent.parts[1:]])
        allowed = re.sub(r"[^\w\-./ ]", "_", key, flags=re.ASCII)
        run.client.log_image(run.state.run_id, mlflow.Image(str(path)), key=allowed, step=int(found[1]))
    else:
        folder = str(target.parent)
        run.client.log_artifact(run.state.run_id, str(path), None if folder == "." else folder)
    run.state.files[name] = version
    if _TABLE.fullmatch(name):
        tables = sorted(one.removeprefix(f"{ARTIFACTS_DIRECTORY}/") for one in run.state.files if _TABLE.fullmatch(one))
        listed = [{"path": table, "type": "table"} for table in tables]
        run.client.set_tag(run.state.run_id, "mlflow.loggedArtifacts", json.dumps(listed))
    run.save()
