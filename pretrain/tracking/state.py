"""RUN/mlflow.json: how far MLflow has been fed."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_sound_json
from pretrain.tracking.moved import uri_now

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
    upload. `checkpoints`: by the name of the checkpoint's directory. `names`: the version of the metrics' names.
    """

    tracking_uri: str
    experiment_id: str
    run_id: str
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)
    checkpoints: dict[str, LoggedCheckpoint] = field(default_factory=dict)
    names: int = 1

    def save(self, run_dir: Path) -> None:
        write_json(run_dir / STATE_FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: Path) -> "FeedState | None":
        state = read_sound_json(run_dir / STATE_FILE, cls)
        return replace(state, tracking_uri=uri_now(state.tracking_uri, run_dir)) if state else None
