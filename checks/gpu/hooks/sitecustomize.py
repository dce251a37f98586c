"""With this folder on PYTHONPATH, no Python process has the modules that ABSENT_MODULES names, with commas between
them: as if they weren't installed. Python imports a module of this name before anything else.
"""

import os
import sys
from typing import Any


class _Without:
    """A finder of modules, but for some."""

    def __init__(self, finder: Any, names: list[str]):
        self._finder, self._names = finder, names

    def find_spec(self, name: str, *others: Any) -> Any:
        return None if name.partition(".")[0] in self._names else self._finder.find_spec(name, *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


if "ABSENT_MODULES" in os.environ:
    names = os.environ["ABSENT_MODULES"].split(",")
    sys.meta_path[:] = [_Without(finder, names) for finder in sys.meta_path]
