"""Rows as tables of Arrow. `pyarrow.array`, and all that calls it, imports pandas where that is installed, to look
whether it was given some of it: 230 ms and 40 MB of every worker."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """A table of `rows`, each with the values of the columns of `schema`: strings (also in UTF-8), int64 or
    booleans, or None.

    Raises ArrowInvalid for a column of strings, not large ones, that would have 2 GiB.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [_array(values, column.type) for values, column in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    present = None
    if None in values:
        present = _bits([value is not None for value in values])
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
