"""With this folder on PYTHONPATH, every rank records the rows that each of its steps takes.

Python imports a module of this name before anything else. RECORDED_ROWS names the folder for the records: a file for
each process, a line for each step, {"step", "rank", "rows": a digest of each row of the rank's micro-batches}.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType


class _AfterEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads pretrain.zero.engine as usual, then makes it record its steps."""

    def find_spec(self, name, path, target=None):
        if name != "pretrain.zero.engine":
            return None
        sys.meta_path.remove(self)
        self._spec = importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, self, origin=self._spec.origin)

    def create_module(self, spec) -> ModuleType:
        return importlib.util.module_from_spec(self._spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader.exec_module(module)
        from tests.pretrain.recorded import record_steps

        record_steps(module.Engine)


if "RANK" in os.environ and "RECORDED_ROWS" in os.environ:
    sys.meta_path.insert(0, _AfterEngine())
