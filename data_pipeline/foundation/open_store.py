"""The store of a corpus by its location."""

from pathlib import Path

from data_pipeline.foundation.lazy_imports import imported_at_first_use
from data_pipeline.foundation.local_store import LocalStore
from data_pipeline.foundation.store import Store

with imported_at_first_use():  # fsspec takes 60 ms
    from data_pipeline.foundation import object_store


def open_store(location: str | Path | Store) -> Store:
    """The store of the corpus at a path or URL; nothing is read."""
    if isinstance(location, Store):
        return location
    path = str(location).removeprefix("file://")
    return object_store.ObjectStore(path) if "://" in path else LocalStore(Path(path))
