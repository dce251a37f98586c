"""The files of a run that MLflow gets: artifacts, tables and images.

RUN/artifacts/evaluation/NAME.json                 a table: MLflow's UI lists it as one
RUN/artifacts/evaluation/NAME/step-00001000.png    an image pictures/NAME of a step: the UI has a slider over the steps
RUN/artifacts/…                                    any other file, under its own path
"""

import json
import re
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX
from pretrain.tracking.metric_points import PICTURES
from pretrain.tracking.mlflow_run import ARTIFACTS_DIRECTORY, MlflowRun, file_version

_STEP = re.compile(r"step-(\d+)\.png")


@dataclass(frozen=True)
class _File:
    """A file, its name in FeedState.files, and the path below `artifacts` that it is uploaded to."""

    path: Path
    name: str
    target: PurePosixPath

    @property
    def is_table(self) -> bool:
        return self.target.parts[0] == "evaluation" and self.target.suffix == ".json"


class Uploads:
    """Uploads what is new or has changed. Uploading a file again replaces it."""

    def __init__(self, run: MlflowRun):
        self._run, self._client, self._run_id = run, run.client, run.state.run_id
        self._tables: list[str] = []  # that this process has listed in the run's tag

    def send(self) -> None:
        files = [file for file in self._files() if file.path.is_file()]
        for file in files:
            version = file_version(file.path)
            if self._run.state.files.get(file.name) == version:
                continue
            if found := _STEP.fullmatch(file.target.name):
                self._send_image(file, int(found[1]))
            else:
                folder = str(file.target.parent)
                self._client.log_artifact(self._run_id, str(file.path), None if folder == "." else folder)
            self._run.state.files[file.name] = version
            self._run.save()
        tables = [str(file.target) for file in files if file.is_table]
        if tables != self._tables:
            listed = json.dumps([{"path": path, "type": "table"} for path in tables])
            self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", listed)
            self._tables = tables

    def _files(self) -> Iterator[_File]:
        for name in self._run.description.artifacts:
            path = self._run.directory / name  # joining keeps an absolute path
            yield _File(path, name, PurePosixPath(path.name))
        directory = self._run.directory / ARTIFACTS_DIRECTORY
        for path in sorted(directory.rglob("*")):
            if not path.name.endswith(TEMPORARY_SUFFIX):
                target = PurePosixPath(path.relative_to(directory))
                yield _File(path, str(path.relative_to(self._run.directory)), target)

    def _send_image(self, file: _File, step: int) -> None:
        """Uploads an image as MlflowClient.log_image names it, but under the same name each time."""
        from mlflow.tracking.multimedia import Image, compress_image_size  # mlflow takes a second to import

        key = str(PurePosixPath(PICTURES, *file.target.parent.parts[1:]))
        unique = uuid.uuid5(uuid.UUID(self._run.description.key), str(file.target))
        time = (
            int(self._run.description.started * 1000) + step
        )  # one image for each step, so any time will do that stays the same
        # MLflow writes ~ for /, since the name may not contain a slash
        name = f"{key.replace('/', '~')}+step+{step}+timestamp+{time}+{unique}"
        image = Image(str(file.path)).to_pil()
        with tempfile.TemporaryDirectory() as folder:
            image.save(Path(folder) / f"{name}.png")
            compress_image_size(image).save(Path(folder) / f"{name}+compressed.webp")
            self._client.log_artifacts(self._run_id, folder, "images")
        self._client.set_tag(self._run_id, "mlflow.loggedImages", "True")
