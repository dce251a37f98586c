"""A run as MLflow has it, and the two files in its directory that say so, which feeder.py lists with the others."""

import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_valid_json

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TRACKING_FILE, STATE_FILE = "tracking.json", "mlflow.json"
ARTIFACTS_DIRECTORY = "artifacts"
DIGEST_LENGTH = 36  # of a dataset: MLflow's limit
_PARENT = "parent_of_runs"  # the tag that tells a parent from a training run of the same name
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

    @property
    def in_mlflow(self) -> dict[str, str]:
        """Name and digest: MLflow keeps one input of each pair, and a corpus may be both trained and validated on."""
        return {"name": f"{self.name} ({self.context})", "digest": self.digest[:DIGEST_LENGTH]}


@dataclass
class TrackedRun:
    """The description of a run for MLflow.

    `parameters` is the resolved run file, `tags` what else names the run, `artifacts` files by their paths in the run
    directory, and `parent` the name of the run that MLflow shows it under. `key` finds the run in MLflow again if
    mlflow.json is lost.
    """

    experiment: str
    run_name: str
    attempt: int
    uri: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[DatasetInfo] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    parent: str | None = None
    status: str = "RUNNING"
    started: float = field(default_factory=time.time)
    ended: float | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / TRACKING_FILE, self)

    @classmethod
    def load(cls, run_dir: Path) -> "TrackedRun | None":
        return read_valid_json(run_dir / TRACKING_FILE, cls)


@dataclass
class LoggedCheckpoint:
    """A checkpoint in MLflow. `version`: [mtime_ns, bytes] of its index."""

    model_id: str
    version: list[int]


@dataclass
class FeedState:
    """The part of a run that MLflow has.

    `offsets`: bytes of each file of metrics, by its path in the run directory. `files`: [mtime_ns, bytes] of each
    upload. `checkpoints`: by the name of the checkpoint's directory.
    """

    tracking_uri: str
    experiment_id: str
    run_id: str
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    checkpoints: dict[str, LoggedCheckpoint] = field(default_factory=dict)

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / STATE_FILE, self)

    @classmethod
    def load(cls, run_dir: Path) -> "FeedState | None":
        return read_valid_json(run_dir / STATE_FILE, cls)


@dataclass(frozen=True)
class MlflowRun:
    """A run with MLflow's client and what MLflow has of it. `parent`: the id of the run that it stands below."""

    client: "MlflowClient"
    directory: Path
    description: TrackedRun
    state: FeedState
    parent: str | None

    def save(self) -> None:
        self.state.save(self.directory)


def file_version(file: Path) -> list[int]:
    """[mtime_ns, bytes], by which a changed file is recognised. Raises FileNotFoundError."""
    stat = file.stat()
    return [stat.st_mtime_ns, stat.st_size]


def parent_run(client: "MlflowClient", experiment_id: str, name: str) -> str:
    """The id of the parent run `name`, which is created if it doesn't exist.

    Runs that start together may each create one. All of them then take the oldest, and the others are deleted.
    """
    tag = name.replace("'", "_")  # so that a filter can hold it
    found = _parents(client, experiment_id, tag)
    if not found:
        created = client.create_run(experiment_id, tags={_PARENT: tag}, run_name=name).info.run_id
        found = _parents(client, experiment_id, tag)
        if found[0].info.run_id != created:
            client.delete_run(created)
    return found[0].info.run_id


def settle_parent(client: "MlflowClient", experiment_id: str, parent_id: str) -> None:
    """Ends the parent run once none of its runs is running; it has failed if one of them has."""
    runs = client.search_runs([experiment_id], f"tags.`mlflow.parentRunId` = '{parent_id}'")
    statuses = {run.info.status for run in runs}
    if "RUNNING" not in statuses:
        status = next((one for one in ("FAILED", "KILLED") if one in statuses), "FINISHED")
        client.set_terminated(parent_id, status)


def _parents(client: "MlflowClient", experiment_id: str, tag: str) -> list[Any]:
    """The parent runs with the value `tag`, the oldest first."""
    runs = client.search_runs([experiment_id], f"tags.{_PARENT} = '{tag}'")
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))
