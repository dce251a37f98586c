"""Imports of large packages."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For a block that imports large packages: Python doesn't search for garbage within the block, but once at its end.

    PyTorch, DeepSpeed and MLflow make 360,000 objects, which stay. By default, Python searches all of them several
    times while they are imported, which is a fifth of the imports' time.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if searches:
            gc.enable()
