"""Where the time of a stage went, as its driver saw it."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_valid_json


@dataclass(frozen=True)
class Timing:
    """A stage's last run that had units to do, in seconds.

    Of its `seconds`, it `waited` for a cluster to start. `busy` is the time that all units together took of `workers`
    workers, and `driver` the processor's time in the driver.
    """

    seconds: float
    waited: float
    workers: int
    busy: float
    driver: float

    @property
    def idle(self) -> float:
        """The worker-seconds without a unit, while the cluster was up."""
        return max(0.0, self.workers * (self.seconds - self.waited) - self.busy)


def note(corpus: Path, stage: str, timing: Timing) -> None:
    write_json(_path(corpus, stage), timing)


def noted(corpus: Path, stage: str) -> Timing | None:
    """None if the stage has never had a unit to do."""
    return read_valid_json(_path(corpus, stage), Timing)


def _path(corpus: Path, stage: str) -> Path:
    return corpus / ".stages" / "timings" / f"{stage}.json"
