"""Pretraining of encoder-decoder models with DeepSpeed.

`__all__` is what Python code may rely on. Each name is imported when it is first used, so `import pretrain` is quick.
docs/how-to/use-from-python.md has an example of each.

Every command and every function begins with the import of this package, so the waiting threads of PyTorch, which is
imported later, are limited here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pretrain.hardware import limit_spinning

if TYPE_CHECKING:
    from pretrain.from_python import experiment, train
    from pretrain.loaded import PretrainedModel, load
    from pretrain.run_directory import Run

_MODULES = {
    "PretrainedModel": "loaded",
    "Run": "run_directory",
    "experiment": "from_python",
    "load": "loaded",
    "train": "from_python",
}

__all__ = ["PretrainedModel", "Run", "experiment", "load", "train"]

limit_spinning()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
