"""With this folder on PYTHONPATH, one rank meets one fault at one point of its work; see tests/fault_matrix.py.

Python imports a module of this name before anything else. FAULT has the fault as JSON, in the environment.
RECORDED_ROWS is the folder to which each rank writes the rows of its steps. BUILD_FAULT has the fault of a build.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType


class _Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads `modules` as usual, and plants the fault there."""

    def __init__(self, modules, before_import, plant):
        self._modules, self._specs = set(modules), {}
        self._before_import, self._plant = before_import, plant

    def find_spec(self, name, path, target=None):
        if name not in self._modules:
            return None
        self._modules.remove(name)
        self._specs[name] = importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, self, origin=self._specs[name].origin)

    def create_module(self, spec) -> ModuleType:
        return importlib.util.module_from_spec(self._specs[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        self._before_import(module.__name__)
        self._specs[module.__name__].loader.exec_module(module)
        self._plant(module)


def _prepare_run() -> None:
    from tests.faults import planted
    from tests.faults.happening import CLOCKS

    plan = planted.planned()
    if plan and plan.fault in CLOCKS:  # of every process
        planted.turn_clock(plan)
    if "RANK" in os.environ:
        planting = _Planting(
            planted.MODULES, lambda name: planted.before_import(name, plan), lambda module: planted.plant(module, plan)
        )
        sys.meta_path.insert(0, planting)


def _prepare_build() -> None:
    from tests.faults import building

    sys.meta_path.insert(0, _Planting([building.MODULE], lambda name: None, building.plant))


if "BUILD_FAULT" in os.environ:
    _prepare_build()
if "RECORDED_ROWS" in os.environ:
    _prepare_run()
