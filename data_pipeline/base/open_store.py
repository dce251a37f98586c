"""Opens the store of a corpus."""

from pathlib import Path

from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.store import Store


def open_store(location: str | Path | Store, at_start: bool = False) -> Store:
    """The store of the corpus at a path or URL. Reads nothing. `at_start`: of a build, as `ObjectStore` has it."""
    if isinstance(location, Store):
        return location
    path = str(location).removeprefix("file://")
    if "://" not in path:
        return LocalStore(Path(path))
    from data_pipeline.base.object_store import ObjectStore  # fsspec takes 60 ms, for a bucket alone

    return ObjectStore(path, at_start)
