"""Hides modules from a library that imports them without need."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder


class _Nowhere(MetaPathFinder):
    """Finds that the modules `names` don't exist, for the thread that has made it."""

    def __init__(self, names: tuple[str, ...]):
        self._names, self._thread = names, threading.get_ident()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Within the block, importing one of the modules `names` raises ModuleNotFoundError in this thread, unless it is
    loaded already."""
    finder = _Nowhere(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
