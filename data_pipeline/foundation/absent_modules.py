"""Hides modules from a library that imports them without need."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Within the block, importing one of the modules `names` raises ModuleNotFoundError, unless it is loaded already.

    Python's import system does so for a name whose entry in `sys.modules` is None.
    """
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in names if name not in modules]
    modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
