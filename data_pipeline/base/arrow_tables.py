"""Writes rows as Arrow tables and Parquet files.

Columns are made from buffers. `pyarrow.array` would import pandas where it is installed, which takes each worker 230 ms
and 40 MB.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base.store import Store

_GROUP_CHARACTERS = 8_000_000


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """A table of `rows`, whose values are in the order of the columns of `schema`: str, UTF-8 bytes, int, bool or None.

    Raises ArrowInvalid if a column of `string` would have 2 GiB; `large_string` has no such limit.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [_array(values, column.type) for values, column in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    present = _bits([value is not None for value in values]) if None in values else None
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, len(values), [present, _bits(values)])
    if pa.types.is_int64(kind):
        numbers = np.array([value or 0 for value in values], dtype=np.int64)
        return pa.Array.from_buffers(kind, len(values), [present, pa.py_buffer(numbers)])
    encoded = [value.encode() if isinstance(value, str) else value or b"" for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [present, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(values), buffers).cast(kind)


def _bits(values: Sequence[bool | None]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(values, dtype=bool), bitorder="little"))


class RowsFile:
    """Writes rows to a Parquet file, with one row group at a time in memory."""

    def __init__(self, writer: pq.ParquetWriter):
        self.writer = writer
        self._group: list[tuple[Any, ...]] = []
        self._characters = 0

    def add(self, row: tuple[Any, ...], characters: int) -> None:
        """Adds the values of a row, in the order of the columns."""
        self._group.append(row)
        self._characters += characters
        if self._characters >= _GROUP_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows added since the last flush as a row group."""
        self.writer.write_table(table_of(self._group, self.writer.schema))
        self._group, self._characters = [], 0


@contextlib.contextmanager
def rows_file(store: Store, name: str, schema: pa.Schema) -> Iterator[RowsFile]:
    """A Parquet file that appears in `store` when the block succeeds."""
    with store.put(name) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        file = RowsFile(writer)
        yield file
        file.flush()
