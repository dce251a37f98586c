"""Reads the documents of a corpus from its Parquet files."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base.errors import FailedError, one_line
from data_pipeline.base.store import Store
from data_pipeline.text.document import Document

SCHEMA = pa.schema(
    [(field.name, pa.large_string() if field.name == "text" else pa.string()) for field in fields(Document)]
)


def document_files(store: Store) -> list[str]:
    """The files with the documents of a finished corpus, sorted; [] if this copy has none."""
    return sorted(name for name in store.names("documents") if name.endswith(".parquet"))


def all_documents(store: Store, *columns: str) -> Iterator[Document]:
    """The documents of a finished corpus with the fields `columns`, or all fields; none if this copy has none."""
    return read_documents(store, document_files(store), list(columns) or list(Document.__slots__))


def read_documents(store: Store, parts: Iterable[str], columns: list[str]) -> Iterator[Document]:
    """The documents of `parts` with only the fields `columns`. Holds one row group in memory."""
    for part in parts:
        path = store.at(part)
        with _readable(path):
            opened = pq.ParquetFile(store.readable(part))
        with opened as file:
            for group in range(file.num_row_groups):
                with _readable(path):
                    table = file.read_row_group(group, columns)
                yield from _documents(table)


def _documents(table: pa.Table) -> Iterator[Document]:
    """A document for each row. Fields without a column are "". Rows as dictionaries would take twice as long."""
    read, empty = table.column_names, [""] * len(table)
    return map(Document, *(table[name].to_pylist() if name in read else empty for name in SCHEMA.names))


@contextlib.contextmanager
def _readable(part: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = f"damaged: {one_line(error)}; data-pipeline build CORPUS.yaml --repair writes it again"
        raise FailedError(f"{part}: {reason}") from None
