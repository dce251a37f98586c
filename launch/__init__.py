"""Starts and supervises runs: on one machine, on hosts, under SLURM.

`__all__` is what Python code may rely on; docs/how-to/use-from-python.md has an example.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.from_python import local

__all__ = ["local"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.from_python"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
