"""Where a run stands between two steps: what a checkpoint keeps besides tensors."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import read_json
from data_pipeline.loading.stream import Skipped
from pretrain.run.health import Health

REWINDS = "rewinds.json"


@dataclass(frozen=True)
class Standing:
    """`step`: steps done; `position`: rows consumed over all corpora; `skipped`: damaged blocks met on the way."""

    step: int = 0
    position: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    health: Health = field(default_factory=Health)


@dataclass(frozen=True)
class Rewind:
    """After a spike of the loss: from the checkpoint of `step`, at `position`, the run went on with row `to`."""

    step: int
    position: int
    to: int
    spike_step: int
    loss: float


def rewinds(run: Path) -> list[Rewind]:
    """Those of a run so far, the last one at the end. Raises FailedError where the file is damaged."""
    try:
        return read_json(run / REWINDS, list[Rewind])
    except FileNotFoundError:
        return []
    except FailedError as error:
        way_out = "it names rows that spoilt the loss; without it a run takes them again, where it went back last"
        raise FailedError(f"{error} ({way_out})") from None


def add_rewind(run: Path, rewind: Rewind) -> None:
    write_json(run / REWINDS, [asdict(one) for one in [*rewinds(run), rewind]])


def position_after(run: Path, standing: Standing) -> int:
    """The next row's position: behind the offending ones where the run was taken back to this very standing."""
    places = [one.to for one in rewinds(run) if (one.step, one.position) == (standing.step, standing.position)]
    return places[-1] if places else standing.position
