"""With this folder on PYTHONPATH, one rank meets one fault at one point of its work; see checks/faults.

Python imports a module of this name before anything else. FAULT has the fault as JSON, in the environment.
RECORDED_ROWS is the folder to which each rank writes the rows of its steps. BUILD_FAULTS has the faults of a build.
"""

import os

from tests.support.planting import Planting


def _prepare_run() -> None:
    from checks.faults import planted
    from checks.faults.happening import CLOCKS

    plan = planted.planned()
    if plan and plan.fault in CLOCKS:  # of every process
        planted.turn_clock(plan)
    if "RANK" in os.environ:
        before, after = (lambda name: planted.before_import(name, plan)), (lambda module: planted.plant(module, plan))
        Planting(planted.MODULES, after, before).start()


def _prepare_build() -> None:
    from checks.faults import building

    Planting([building.MODULE], building.plant).start()


if "BUILD_FAULTS" in os.environ:
    _prepare_build()
if "RECORDED_ROWS" in os.environ:
    _prepare_run()
