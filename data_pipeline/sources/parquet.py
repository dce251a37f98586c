"""Parquet files with a column of text."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.foundation.progress import advance
from data_pipeline.sources.compression.stream import open_to_jump_about
from data_pipeline.sources.record import Input, Intake, Record

_ROWS = 1024  # per batch
_BUFFER = 1 << 20


class Options(Section):
    """Names of the columns. All but `text` may be absent, unless the config names them."""

    text: str = "text"
    """Column of the text."""
    url: str = "url"
    """Column of the URL."""
    title: str = "title"
    """Column of the title."""
    language: str = "language"
    """Column of the language."""
    timestamp: str = "timestamp"
    """Column of the timestamp, by which `dedup.urls` chooses the newest page."""


_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)  # UnicodeDecodeError: in the names of columns


def read(file: Input, intake: Intake) -> Iterator[Record]:
    """A record for every row with a text, a batch at a time; the ordinal is the row's index.

    Counts `read` (rows) and `empty` (null or blank texts, dropped). A row that isn't UTF-8 is damage. If part of a row
    group can't be read, its remaining rows are damage too. Pages that have checksums are checked against them. Raises
    `UserError` for a column that doesn't exist or has no strings, `DamagedInput` for a file that isn't Parquet or has
    lost its footer.

        text: "Hello.", url: "https://a.org/"  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = Options(**file.options)
    with open_to_jump_about(file.path) as source:
        try:
            parquet = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)
            columns = _columns(file.path, parquet.schema_arrow, options)
        except _UNREADABLE as error:
            raise DamagedInput(file.path, "its footer", _one_line(error)) from None
        ordinal = 0
        for group in range(parquet.num_row_groups):
            described = parquet.metadata.row_group(group)
            end = ordinal + described.num_rows
            try:
                for batch in parquet.iter_batches(_ROWS, [group], list(columns.values())):
                    values = {field: batch.column(name) for field, name in columns.items()}
                    rows = [_values(column) for column in values.values()]
                    for row in zip(*rows, strict=True):
                        record = _record(ordinal, dict(zip(values, row, strict=True)), intake)
                        ordinal += 1
                        if record:
                            yield record
                if ordinal != end:
                    raise pa.ArrowInvalid(f"ends after row {ordinal}")
            except _UNREADABLE as error:
                lost = end - ordinal
                intake.damaged(f"rows {ordinal} to {end - 1}, row group {group}", _one_line(error))
                intake.counters["damaged"] += lost - 1
                intake.counters["read"] += lost
                ordinal = end
            advance(sum(described.column(place).total_compressed_size for place in range(described.num_columns)))


def _columns(path: str, schema: pa.Schema, options: Options) -> dict[str, str]:
    columns = {}
    for field, name in options.model_dump().items():
        if name not in schema.names:
            if field == "text" or (field in options.model_fields_set and name):
                raise UserError(f"{path}: no column {name!r} for the {field}; there are {', '.join(schema.names)}")
            continue
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        is_time = field == "timestamp" and pa.types.is_temporal(kind)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if is_text or is_time:
            columns[field] = name
        elif field == "text" or field in options.model_fields_set:
            raise UserError(f"{path}: column {name!r} is {kind}, expected strings")
    return columns


def _values(column: pa.Array) -> list[Any]:
    """The column's times, nulls and strings; strings as bytes, so that invalid UTF-8 spoils only its own row."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return (column if pa.types.is_temporal(column.type) else column.cast(pa.large_binary())).to_pylist()


def _record(ordinal: int, row: dict[str, Any], intake: Intake) -> Record | None:
    intake.counters["read"] += 1
    try:
        values: dict[str, Any] = {field: _text(value) for field, value in row.items() if value is not None}
    except UnicodeDecodeError as error:
        intake.damaged(f"row {ordinal}", str(error))
        return None
    if not values.get("text", "").strip():
        intake.counters["empty"] += 1
        return None
    return Record(ordinal, **values)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
