"""Keeps PyTorch's compiler out of runs that compile nothing: its import takes 1.7 s of a core and 120 MB on each rank.

PyTorch's optimizers import it only to say that they aren't to be compiled, and DeepSpeed only to decorate its Muon.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"


class _Absent(ModuleType):
    """Stands for torch._dynamo as long as nobody needs more of it than its ways not to compile something."""

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        return fn if fn is not None else lambda fn: fn

    def graph_break(self, msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for: the module itself then takes this one's place."""
        if name.startswith("__") and name != "__path__":  # __path__: someone imports a submodule
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)


def keep_compiler_away() -> None:
    """Calls of torch._dynamo.disable and graph_break don't import it from here on.

    Call this once the process group exists, and only if no layer is compiled: functions that are used meanwhile are
    compiled later with what calls them.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _Absent(_COMPILER)


def import_undecorated(name: str) -> None:
    """Imports the module `name` with a torch.compile that returns functions as they are."""
    if name in sys.modules:
        return
    compile_ = torch.compile
    torch.compile = _as_it_is
    try:
        importlib.import_module(name)
    finally:
        torch.compile = compile_


def _as_it_is(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    return model if model is not None else _as_it_is
