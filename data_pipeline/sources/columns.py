"""Columns of tables as Arrow holds them: which become the fields of a record, and the records of their rows."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

from data_pipeline.foundation.errors import UserError
from data_pipeline.sources.record import FieldNames, Intake, Record, record_of

UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)  # UnicodeDecodeError: in the names of columns


class Columns(FieldNames):
    """Names of the columns. All but `text` may be absent, unless the config names them."""

    def present(self, path: str, names: list[str]) -> dict[str, str]:
        """The name of each field's column, of those in `names`. Raises UserError for one that is missing."""
        columns = {}
        for field in FieldNames.model_fields:
            if (name := getattr(self, field)) in names:
                columns[field] = name
            elif field == "text" or (field in self.model_fields_set and name):
                raise UserError(f"{path}: no column {name!r} for the {field}; there are {', '.join(names)}")
        return columns


def columns_of(path: str, schema: pa.Schema, options: Columns) -> dict[str, str]:
    """The column of each field. Raises UserError for one that doesn't exist or has no strings."""
    columns = options.present(path, schema.names)
    for field, name in list(columns.items()):
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_time = field == "timestamp" and pa.types.is_temporal(kind)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if is_text or is_time:
            continue
        if field == "text" or field in options.model_fields_set:
            raise UserError(f"{path}: column {name!r} is {kind}, expected strings")
        del columns[field]
    return columns


def records(batch: pa.RecordBatch, columns: dict[str, str], first: int, intake: Intake) -> Iterator[Record | None]:
    """A record for every row with a text, None for others, which are counted. `first`: the ordinal of the first."""
    rows = [_values(batch.column(name)) for name in columns.values()]
    for ordinal, row in enumerate(zip(*rows, strict=True), first):
        yield _record(ordinal, dict(zip(columns, row, strict=True)), intake)


def _values(column: pa.Array) -> list[Any]:
    """The column's times, nulls and strings; strings as bytes, so that invalid UTF-8 spoils only its own row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return (column if pa.types.is_temporal(column.type) else column.cast(pa.large_binary())).to_pylist()


def _record(ordinal: int, row: dict[str, object], intake: Intake) -> Record | None:
    intake.counters["read"] += 1
    try:
        values = {field: _text(value) for field, value in row.items() if value is not None}
    except UnicodeDecodeError as error:
        intake.damaged(f"row {ordinal}", str(error))
        return None
    return record_of(ordinal, values, intake)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value.isoformat() if isinstance(value, datetime) else str(value)
