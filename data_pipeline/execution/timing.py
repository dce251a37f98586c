"""Where the time of a stage went, as its driver saw it."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_valid_json


@dataclass(frozen=True)
class Timing:
    """A stage's last run that had units to do: how long it took, and of that for a cluster to start.

    `idle_seconds`: the time of all workers without a unit, once the cluster was up. `driver_core_seconds`: the
    processor time of the driver.
    """

    seconds: float
    workers: int
    idle_seconds: float
    ray_start_seconds: float
    driver_core_seconds: float


def write(corpus: Path, stage: str, timing: Timing) -> None:
    write_json(_path(corpus, stage), timing)


def read(corpus: Path, stage: str) -> Timing | None:
    """None if the stage has never had a unit to do."""
    return read_valid_json(_path(corpus, stage), Timing)


def _path(corpus: Path, stage: str) -> Path:
    return corpus / ".stages" / "timings" / f"{stage}.json"
