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
        spikes: steps of the whole run whose loss was a spike.
        recent: the losses of the last steps, without spikes.
        high: the losses since a spike began; empty once it is over.
    """

    skipped: int = 0
    in_a_row: int = 0
    spikes: int = 0
    recent: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def spiking(self) -> bool:
        """True while a spike lasts."""
        return bool(self.high)

    def after(self, loss: float, applied: bool, settings: SpikeSection | None) -> "Health":
        """The health after one more step, which had this `loss` and was or wasn't `applied`."""
        if not applied:
            return replace(self, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if settings is None:
            return replace(self, in_a_row=0, recent=(), high=())
        over, largest = self._limits(settings)
        next_one = replace(self, in_a_row=0, spikes=self.spikes + (loss > largest))
        if loss <= (over if self.high else largest):
            return replace(next_one, recent=(*self.recent, loss)[-settings.window :], high=())
        high = (*self.high, loss)
        if len(high) < settings.window:
            return replace(next_one, high=high)
        return replace(next_one, recent=high[-settings.window :], high=())  # losses stay as high

    def _limits(self, settings: SpikeSection) -> tuple[float, float]:
        """The loss at which a spike is over, and the largest loss that begins none: infinite until the window is full.

        A spike is over when the loss is at most half as far above the mean. So a loss at the edge is one spike.
        """
        if len(self.recent) < settings.window:
            return math.inf, math.inf
        mean = math.fsum(self.recent) / len(self.recent)
        far = settings.threshold * max(statistics.pstdev(self.recent, mean), _LEAST_DEVIATION * abs(mean))
        return mean + far / 2, mean + far

    def in_new_stage(self) -> "Health":
        """This health before the first step of a curriculum's stage, whose losses the losses before don't predict."""
        return replace(self, recent=(), high=())

    def rewound_to(self, then: "Health") -> "Health":
        """The health of a run that is rewound to a checkpoint, whose health is `then`: counts are of the whole run."""
        return replace(then, skipped=self.skipped, spikes=self.spikes, high=self.high)


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
    """A rewind after a spike: to the checkpoint of `step`, at row `position`. The run continued with row `to`.

    `spikes` and `skipped`: the counts of the run when it was rewound.
    """

    step: int
    position: int
    to: int
    spike_step: int
    loss: float
    spikes: int = 0
    skipped: int = 0


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


def after_rewinds(run: Path, saved: TrainState) -> TrainState:
    """The state that a run resumes from with the state of a checkpoint: after the rows of the spike, and with its
    counts, if the run was rewound to exactly this state."""
    to_here = [one for one in rewinds(run) if (one.step, one.position) == (saved.step, saved.position)]
    if not to_here:
        return saved
    last, health = to_here[-1], saved.health
    counts = {name: max(getattr(last, name), getattr(health, name)) for name in ("spikes", "skipped")}
    return replace(saved, position=last.to, health=replace(health, **counts))
