"""Changes modules of a process right after it has imported them: for a `sitecustomize`, which Python imports first."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Planting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads `modules` as usual, with `before_import(name)` before it and `plant(module)` after it."""

    def __init__(
        self,
        modules: Iterable[str],
        plant: Callable[[ModuleType], object],
        before_import: Callable[[str], object] = lambda name: None,
    ):
        self._modules, self._specs = set(modules), dict[str, Any]()
        self._plant, self._before_import = plant, before_import

    def start(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        self._modules.remove(name)
        self._specs[name] = importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, self, origin=self._specs[name].origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.util.module_from_spec(self._specs[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        self._before_import(module.__name__)
        self._specs[module.__name__].loader.exec_module(module)
        self._plant(module)
