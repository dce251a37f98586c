"""RUN/mlflow.json: how far MLflow has been fed."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_sound_json

STATE_FILE = "mlflow.json"


@dataclass
class LoggedCheckpoint:
    """A checkpoint in MLflow. `version`: [mtime_ns, bytes] of its index; None once the checkpoint is deleted."""

    model_id: str
    version: list[int] | None


@dataclass
class FeedState:
    """What MLflow has of a run.

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
        write_json(run_dir / STATE_FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> "FeedState | None":
        return read_sound_json(run_dir / STATE_FILE, cls)
