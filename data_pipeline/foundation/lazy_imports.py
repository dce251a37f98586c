"""Imports that stand at the top of a file and are done at first use, so that --help and a mistyped option answer at
once: PyTorch alone takes 2 s. PEP 810's statement `lazy import` of Python 3.15 will replace this.

Mercurial's `demandimport` replaced `__import__`, too. importlib.util.LazyLoader won't do: it executes a package for
each module inside it, a module once a second file imports it, and before Python 3.12.3 threads see it half executed.
"""

import builtins
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

_one_block = threading.Lock()


class _StandIn(ModuleType):
    """Has the name of a module, imports it when the first attribute is asked for, and has its attributes."""

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self):
            vars(self)["module"] = import_module(self.__name__)
        return getattr(vars(self)["module"], name)


@contextmanager
def imported_at_first_use() -> Iterator[None]:
    """Within the block, `import package` and `from package import module` import nothing yet; only modules may stand
    there. All other imports are ordinary ones: those at first use, and those of other files and threads."""
    file = sys._getframe(2).f_globals  # below `__enter__`

    def stand_ins(package: str, *given: Any, **named: Any) -> Any:
        if not given or given[0] is not file:
            return usual(package, *given, **named)
        modules = {name: _StandIn(f"{package}.{name}") for name in given[2] or ()}
        return SimpleNamespace(**modules) if modules else _StandIn(package)

    with _one_block:
        usual, builtins.__import__ = builtins.__import__, stand_ins  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.__import__ = usual
