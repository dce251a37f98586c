"""RUN/tracking.json: the description of a run from which MLflow is fed."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_sound_json
from pretrain.tracking.moved import uri_now

TRACKING_FILE = "tracking.json"
ARTIFACTS_DIRECTORY = "artifacts"
NOTE = "mlflow.note.content"  # the tag that MLflow shows as the description, in Markdown


@dataclass(frozen=True)
class DatasetInfo:
    """A corpus as MLflow shows it.

    `digest` is the manifest's fingerprint, `context` is train or validation, and `profile` has further facts (rows,
    tokens).
    """

    name: str
    digest: str
    source: str
    context: str
    profile: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrackedRun:
    """The description of a run for MLflow. `key` finds the run in MLflow again if mlflow.json is lost.

    `parent` is the name of the run that MLflow shows it under.
    """

    uri: str | None
    experiment: str
    run_name: str
    attempt: int
    parameters: dict[str, Any]
    tags: dict[str, str]
    datasets: list[DatasetInfo]
    artifacts: list[str]
    parent: str | None = None
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / TRACKING_FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> "TrackedRun | None":
        run = read_sound_json(run_dir / TRACKING_FILE, cls)
        return replace(run, uri=uri_now(run.uri, run_dir)) if run and run.uri else run

    def named_datasets(self) -> Iterator[tuple[str, DatasetInfo]]:
        """The datasets under names that differ: MLflow keeps one input for a name and digest."""
        names: set[str] = set()
        for info in self.datasets:
            name = info.name if info.name not in names else f"{info.name} ({info.context})"
            names.add(name)
            yield name, info
