"""Keeps what a rank doesn't use out of it: MLflow with pandas, which DeepSpeed's autotuner imports, and the compiler.

They take 2.7 of the 8 s of processor time of a start with five steps, and 120 MB; a rank is started again after each
failure. PyTorch's optimizers import its compiler only to say that they aren't to be compiled.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"


@contextlib.contextmanager
def absent(name: str) -> Iterator[None]:
    """Within the block, importing the module `name` raises ModuleNotFoundError, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # the import system's own way to say so
    try:
        yield
    finally:
        del sys.modules[name]


def import_uncompiled(name: str) -> None:
    """Imports the module `name`, whose functions torch.compile decorates, with the functions as they are."""
    compile_ = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        importlib.import_module(name)
    finally:
        torch.compile = compile_


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return function if function is not None else _as_it_is


def keep_compiler_away() -> None:
    """Lets `torch._disable_dynamo`, with which PyTorch's optimizers are decorated, return functions as they are.

    The compiler itself is imported as soon as more is asked of it.
    """
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _Absent(_COMPILER)


class _Absent(ModuleType):
    """Stands for torch._dynamo as long as nobody needs more of it than its ways not to compile something."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        return fn if fn is not None else lambda fn: fn

    def graph_break(self, msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for: the module itself takes this one's place."""
        if name.startswith("__") and name != "__path__":  # __path__: someone imports a submodule
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)
