"""From raw text to shards, and from shards to batches.

`__all__` is what Python code may rely on. Each name is imported when it is first used, so `import data_pipeline` is
quick. docs/how-to/use-from-python.md has an example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.base.errors import FailedError, UserError
    from data_pipeline.corpus.objectives.on_tokens import objective
    from data_pipeline.from_python import Corpus, Example, build, open

_MODULES = {
    "Corpus": "from_python",
    "Example": "from_python",
    "FailedError": "base.errors",
    "UserError": "base.errors",
    "build": "from_python",
    "objective": "corpus.objectives.on_tokens",
    "open": "from_python",
}

__all__ = ["Corpus", "Example", "FailedError", "UserError", "build", "objective", "open"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
