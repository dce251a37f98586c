"""A run as Python code uses it: its metrics, its checkpoints and its model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.base import arguments
from data_pipeline.base.errors import UserError
from pretrain.engine.checkpoint.directory import candidates
from pretrain.run import status
from pretrain.run.metrics_file import read_metrics

if TYPE_CHECKING:
    import pandas as pd

    from data_pipeline.corpus.tokenizer import Tokenizer
    from pretrain.loaded import PretrainedModel


def stop_step(value: Any) -> int | None:
    """The `stop_at_step` of a Python call. Raises UserError for anything but None and integers from 1."""
    return None if value is None else arguments.integer("stop_at_step", value, 1)


@dataclass(frozen=True)
class Run:
    """The run in `directory`, training or ended: `Run("runs/mine")`.

    Raises UserError if there is no such directory.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", arguments.local_path(self.directory))
        if not self.directory.is_dir():
            raise UserError(f"{self.directory}: no such directory; give a run directory")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}: {self.state})"

    def metrics(self) -> "pd.DataFrame":
        """A row for each logged step, with `step`, `attempt`, `time` in seconds since 1970, and the metrics by name.

        A metric that a step lacks is NaN. docs/reference/metrics.md has the names.
        """
        import pandas as pd  # 0.4 s, which `launch.local` needn't wait for

        rows = read_metrics(self.directory)
        columns = ("step", "attempt", "time")
        return pd.DataFrame([{name: getattr(row, name) for name in columns} | row.metrics for row in rows])

    @property
    def state(self) -> str:
        """The state of the run: new, running, finished, stopped (on request), failed or died."""
        return status.read(self.directory).state

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints from which the run could resume, oldest first."""
        return candidates(self.directory)[0][::-1]

    def model(self) -> "tuple[PretrainedModel, Tokenizer]":
        """The model of the latest checkpoint, and its tokenizer, as `pretrain.load` returns them."""
        from pretrain.loaded import load  # PyTorch takes 2 s, and metrics don't need it

        return load(self.directory)
