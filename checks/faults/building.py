"""Plants a fault in a worker of a build, in a unit of one stage, or one in each of several; checks/faults/builds.py."""

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from checks.faults.happening import DISK, KILLS, Fault, Here

MODULE = "data_pipeline.engine.work_units"
OUTSIDE = ("the driver killed", "a lost node", "a bit of an input")  # the matrix does these when it sees the marker
SECONDS_TO_ACT = 600.0  # for the matrix and tests, which end the wait with a file beside the marker, or the process
FAULTS: dict[str, Fault] = {"SIGKILL": KILLS["SIGKILL"], **DISK}
WHEN = ("before the work", "after the work")  # after it, the unit's files are there but not its record


@dataclass(frozen=True)
class PlantedInBuild:
    """A fault in the first unit of `stage`; `marker` is created with it."""

    fault: str
    stage: str
    when: str
    marker: str


def plant(module: ModuleType) -> None:
    """Plants the faults of BUILD_FAULTS, each in a stage of its own, in the module that performs units."""
    faults = {one["stage"]: PlantedInBuild(**one) for one in json.loads(os.environ["BUILD_FAULTS"])}
    perform: Any = module._perform  # type: ignore[attr-defined]

    def performed(stage: Any, *arguments: Any) -> Any:
        def work(corpus: Any, spec: Any) -> Any:
            if planted.when == WHEN[0]:
                _happen(planted)
            result = stage.work(corpus, spec)
            if planted.when == WHEN[1]:
                _happen(planted)
            return result

        if stage.name not in faults:
            return perform(stage, *arguments)
        planted = faults[stage.name]
        return perform(replace(stage, work=work), *arguments)

    module._perform = performed  # type: ignore[attr-defined]


def _happen(planted: PlantedInBuild) -> None:
    marker = Path(planted.marker)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if planted.fault in OUTSIDE:
        until = time.monotonic() + SECONDS_TO_ACT
        with contextlib.suppress(OSError):
            while time.monotonic() < until and not marker.with_name("acted").exists():
                time.sleep(0.02)
    else:
        FAULTS[planted.fault](Here())
