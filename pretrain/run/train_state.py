"""The progress of a run between two steps: what a checkpoint keeps besides tensors."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.loading.stream import Skipped
from pretrain.run.health import Health

REWINDS = "rewinds.json"


@dataclass(frozen=True)
class TrainState:
    """The progress of a run: `step` steps done, `position` rows consumed over all corpora, damaged blocks `skipped`.

    `unlogged`: by the name of a loss, its sum over the steps since the last line of metrics, and the number of tokens.
    `callbacks`: what each callback keeps, by its name.
    """

    step: int = 0
    position: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    health: Health = field(default_factory=Health)
    unlogged: dict[str, tuple[float, int]] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewind:
    """After a spike, the run went back to the checkpoint of `step`, at row `position`, and continued with row `to`."""

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
    """The position of the next row: after the rows of the spike if the run went back to exactly this `train_state`."""
    rewound = [one.to for one in rewinds(run) if (one.step, one.position) == (train_state.step, train_state.position)]
    return rewound[-1] if rewound else train_state.position
