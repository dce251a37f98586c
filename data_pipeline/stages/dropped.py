"""Tables of dropped documents, `dropped/*.parquet`: which step dropped a document, and which document stays."""

import contextlib
from collections.abc import Callable, Iterator

import pyarrow as pa

from data_pipeline.base.arrow_tables import rows_file
from data_pipeline.base.store import Store
from data_pipeline.stages.kinds import DROPPED
from data_pipeline.text.document import Document, Dropped, Listener

COLUMNS = ("id", "url", "step", "rule", "kept", "found", "text")
_SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
_CHARACTERS = 200  # of a text
_CHARACTERS_OF_A_ROW = 400


def name_of(stage: str, unit: str) -> str:
    """The name of the table of a unit."""
    return f"{DROPPED.folder}/{stage}-{unit}.parquet"


@contextlib.contextmanager
def dropped_file(
    store: Store, name: str, identity_of: Callable[[int], str] = lambda kept: ""
) -> Iterator[Listener | None]:
    """A function that adds a dropped document to the table `name`, which appears when the block succeeds.

    None if `name` is "". `identity_of`: the id of `Dropped.kept`.
    """
    if not name:
        yield None
        return
    with rows_file(store, name, _SCHEMA) as rows:

        def add(step: str, document: Document, why: Dropped) -> None:
            kept = "" if why.kept is None else identity_of(why.kept)
            row = (document.id, document.url, step, why.rule, kept, why.found, document.text[:_CHARACTERS])
            rows.add(tuple(value.encode("utf-8", "replace") for value in row), _CHARACTERS_OF_A_ROW)

        yield add
