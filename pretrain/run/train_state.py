"""The progress of a run between two steps, which a checkpoint keeps besides tensors."""

import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from data_pipeline.base.atomic import write_json
from data_pipeline.base.errors import FailedError
from data_pipeline.base.json_file import read_json
from data_pipeline.loading.stream import Skipped
from pretrain.config.run_config import SpikeSection

REWINDS = "rewinds.json"
_LEAST_DEVIATION = 0.005  # relative to the mean: on a plateau the losses of large batches hardly differ


@dataclass(frozen=True)
class Health:
    """Counts of skipped steps and spikes, saved in every checkpoint.

    Attributes:
        skipped: steps of the whole run without a finite gradient.
        in_a_row: such steps at the end of the run so far.
        spikes: loss spikes of the whole run.
        recent: the losses of the last steps, without spikes.
    """

    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    recent: tuple[float, ...] = ()

    def after(self, loss: float, applied: bool, settings: SpikeSection | None) -> "Health":
        """The health after one more step, which had this `loss` and was or wasn't `applied`."""
        if not applied:
            return replace(self, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if self.is_spike(loss, settings):
            return replace(self, in_a_row=0, spikes=self.spikes + 1)
        window = settings.window if settings else 0
        return replace(self, in_a_row=0, recent=(*self.recent, loss)[-window:] if window else ())

    def is_spike(self, loss: float, settings: SpikeSection | None) -> bool:
        """True if `loss` is too far above the losses of a full window before it."""
        if settings is None or len(self.recent) < settings.window:
            return False
        mean = math.fsum(self.recent) / len(self.recent)
        deviation = max(statistics.pstdev(self.recent, mean), _LEAST_DEVIATION * abs(mean))
        return loss > mean + settings.threshold * deviation


@dataclass(frozen=True)
class TrainState:
    """The progress of a run.

    Attributes:
        step: the number of steps done.
        position: the number of rows consumed over all corpora.
        skipped: the damaged blocks that were skipped.
        unlogged: by the name of a loss, its sum over the steps since the last log line, and the number of tokens.
        callbacks: the state of each callback, by its name.
    """

    step: NonNegativeInt
    position: Annotated[int, Field(ge=0, lt=2**62)]
    skipped: list[Skipped]
    health: Health = field(default_factory=Health)
    unlogged: dict[str, tuple[float, int]] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def new(cls) -> "TrainState":
        """The progress before the first step."""
        return cls(step=0, position=0, skipped=[])


@dataclass(frozen=True)
class Rewind:
    """A rewind after a spike: to the checkpoint of `step`, at row `position`. The run continued with row `to`."""

    step: int
    position: int
    to: int
    spike_step: int
    loss: float


def rewinds(run: Path) -> list[Rewind]:
    """The rewinds of a run so far, oldest first. Raises FailedError if the file is damaged."""
    try:
        return read_json(run / REWINDS, list[Rewind])
    except FileNotFoundError:
        return []
    except FailedError as error:
        way_out = "it names the rows of spikes; repair it, or remove it to train on those rows again"
        raise FailedError(f"{error} ({way_out})") from None


def add_rewind(run: Path, rewind: Rewind) -> None:
    write_json(run / REWINDS, [asdict(one) for one in [*rewinds(run), rewind]])


def position_after(run: Path, train_state: TrainState) -> int:
    """The position of the next row: after the rows of the spike if the run was rewound to exactly this state."""
    rewound = [one.to for one in rewinds(run) if (one.step, one.position) == (train_state.step, train_state.position)]
    return rewound[-1] if rewound else train_state.position
