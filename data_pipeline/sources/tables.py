"""Tables with columns of text: Parquet, and Arrow as IPC streams (`datasets.save_to_disk`) or IPC files (Feather)."""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_pipeline.base import stores
from data_pipeline.base.errors import DamagedInput, UserError, one_line
from data_pipeline.base.formatting import first_few
from data_pipeline.sources.decompress import Advance, advancing, copy_of
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import FieldNames, IdsOption, Input, ReadStats, Record, record_of, text_of_ids

_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)  # UnicodeDecodeError: in the names of columns
_PARQUET, _IPC_FILE = b"PAR1", b"ARROW1"  # how the files begin; an IPC stream doesn't
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_HEAD = 8  # bytes by which a table is known
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ROWS = 1024  # of a Parquet file, per batch
_BUFFER = 1 << 20
_SHOWN = 8  # names, in a message


class Columns(FieldNames):
    """Names of the columns. All but `text` may be absent, unless the config names them. In Parquet and Arrow,
    "translation.en" is the field `en` of the structs in the column `translation`."""

    def present(self, path: str, names: Sequence[str]) -> dict[str, str]:
        """The column of each field, of the columns `names`. Raises what `present` raises."""
        return present(path, names, self.wanted, self.required)

    @property
    def wanted(self) -> dict[str, str]:
        """The name of the column of each field."""
        return {field: getattr(self, field) for field in FieldNames.model_fields}

    @property
    def required(self) -> set[str]:
        """The fields whose column must be there."""
        return {"text"} | {field for field, name in self.wanted.items() if field in self.model_fields_set and name}


class Options(Columns, IdsOption):
    """Names of the columns of Parquet and Arrow."""


class _Lost(NamedTuple):
    """Rows that can't be read, in a file whose next rows can."""

    rows: int
    where: str
    reason: str


_Rows = Sequence[tuple] | _Lost
ColumnPath = tuple[str, ...]
"""The names that lead to a column, or to a field of its structs: ("translation", "en")."""


def read(kind: "type[ParquetTable] | type[ArrowTable]", file: Input, stats: ReadStats) -> Iterator[Record]:
    """A record for every row with a text, a batch at a time; the ordinal is the row's index.

    Counts `read` (rows) and `empty` (null or blank texts, dropped). A row whose text isn't UTF-8 is damage. Another
    value that Python can't read, such as a time of the year 36812, is damage too, but its row is kept without it. If
    part of a Parquet row group can't be read, the rest of the group is damage; checksums of pages are verified.

    With the option `ids`, a row's text is its list of integers; other integers than from 0 on are damage.

    Raises `UserError` for a column that doesn't exist or has other values. Raises `DamagedInput` for a file without a
    footer or schema, at a batch of an Arrow file that can't be read, since the next batch can't be found then, and at
    the end of an Arrow stream without its end-of-stream marker.

        text: "Hello.", url: "https://a.org/"  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = Options(**file.options)
    for ordinal, row in rows(kind, file, stats, partial(_columns, file.path, options)):
        if record := _record(ordinal, row, stats):
            yield record


def rows(
    kind: "type[ParquetTable] | type[ArrowTable]",
    file: Input,
    stats: ReadStats,
    columns_of: Callable[[pa.Schema], dict[str, ColumnPath]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(ordinal, values by field) of every row that can be read; texts are bytes. `columns_of` has the column of each
    field in a schema.

    Counts `read`, and notes damage, as `read` says. Raises what `read` and `columns_of` raise.
    """
    ordinal = 0
    with stores.open_file(file.path, file.checksum) as stored, contextlib.ExitStack() as scratch:
        source = stored
        if not file.is_sample and not stores.is_local(stores.filesystem(file.path)[0]):
            source = copy_of(stored, scratch)  # reading a table requests parts of the file more than once
            source.seek(0)
        try:
            table = kind(source, advancing(file.checksum))
            found = columns_of(table.schema)
        except _UNREADABLE as error:
            raise DamagedInput(file.path, kind.head, one_line(error)) from None
        try:
            for batch in table.rows(list(found.values())):
                if isinstance(batch, _Lost):
                    where = f"rows {ordinal} to {ordinal + batch.rows - 1}, {batch.where}"
                    stats.damaged(where, batch.reason, batch.rows)
                    stats.counters.read += batch.rows
                    ordinal += batch.rows
                    continue
                for row in batch:
                    stats.counters.read += 1
                    yield ordinal, dict(zip(found, row, strict=True))
                    ordinal += 1
        except _UNREADABLE as error:
            raise DamagedInput(file.path, f"row {ordinal}", one_line(error)) from None


def names(path: str) -> list[str]:
    """The names of the columns, and of the fields of structs in them: "translation", "translation.en"."""
    with stores.open_file(path) as source:
        is_parquet = source.read(len(_PARQUET)) == _PARQUET
        source.seek(0)
        return [
            name for name, _, _ in _fields((ParquetTable if is_parquet else ArrowTable)(source, advancing(None)).schema)
        ]


class ParquetTable:
    """A Parquet file."""

    head = "its footer"

    def __init__(self, source: Any, advance: Advance):
        self._advance = advance
        self._file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)
        self.schema = self._file.schema_arrow
        self._bytes = source.seek(0, 2)

    def rows(self, columns: list[ColumnPath]) -> Iterator[_Rows]:
        names = [*dict.fromkeys(".".join(path) for path in columns)]
        for group in range(self._file.num_row_groups):
            described = self._file.metadata.row_group(group)
            left = max(0, described.num_rows)  # a damaged footer may have a negative number
            try:
                for batch in self._file.iter_batches(_ROWS, [group], names):
                    rows = _values(batch, columns)
                    left -= len(rows)
                    yield rows
                if left:
                    raise pa.ArrowInvalid(f"ends {left} rows too soon")
            except _UNREADABLE as error:
                yield _Lost(left, f"row group {group}", one_line(error))
            # by rows: asking for the sizes of columns aborts the process if their statistics are damaged
            self._advance(self._bytes * max(0, described.num_rows) // max(1, self._file.metadata.num_rows))


class _Bounded(io.RawIOBase):
    """A file of which no more bytes are read than it has left. Python reserves memory for all bytes that are asked for,
    which a damaged length may make petabytes."""

    def __init__(self, file: Any):
        self._file, self._bytes = file, file.seek(0, 2)
        file.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._bytes - self.tell())
        return bytes(self._file.read(left if size is None or size < 0 else min(size, left)))


class ArrowTable:
    """An Arrow IPC stream or file."""

    head = "its schema"

    def __init__(self, source: Any, advance: Advance):
        self._advance = advance
        self._source = _Bounded(source)
        self._is_file = self._source.read(len(_IPC_FILE)) == _IPC_FILE
        self._source.seek(0)
        self._reader = pa.ipc.open_file(self._source) if self._is_file else pa.ipc.open_stream(self._source)
        self.schema = self._reader.schema

    def rows(self, columns: list[ColumnPath]) -> Iterator[_Rows]:
        for batch in self.batches():
            yield _values(batch, columns)

    def batches(self) -> Iterator[Any]:
        """Raises ArrowInvalid for a stream without its end."""
        if self._is_file:
            yield from map(self._reader.get_batch, range(self._reader.num_record_batches))
            return
        position = 0
        for batch in self._reader:
            self._advance(self._source.tell() - position)
            position = self._source.tell()
            yield batch
        self._source.seek(-min(len(_END_OF_STREAM), self._source.seek(0, 2)), 2)
        if self._source.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the stream ends without its end-of-stream marker; the file may be cut off")


def _fields(schema: pa.Schema) -> list[tuple[str, ColumnPath, pa.DataType]]:
    """(name, path, type) of each column, and of each field of structs whose name isn't that of a column."""

    def below(above: ColumnPath, field: pa.Field) -> Iterator[tuple[str, ColumnPath, pa.DataType]]:
        path = (*above, field.name)
        yield ".".join(path), path, field.type
        if pa.types.is_struct(field.type):
            for one in field.type.fields:
                yield from below(path, one)

    found = [one for field in schema for one in below((), field)]
    return [one for one in found if len(one[1]) == 1 or one[0] not in schema.names]


def present(path: str, names: Sequence[str], wanted: Mapping[str, str], required: Collection[str]) -> dict[str, str]:
    """The column of each field of `wanted`, of the columns `names`.

    Raises UserError if the column of a field in `required` is missing or there twice.
    """
    found = {}
    for field, name in wanted.items():
        if (count := names.count(name)) == 1:
            found[field] = name
        elif field in required:
            number = f"{count} columns" if count else "no column"
            way_out = f"name one of them in options: {{{field}: NAME}}"
            raise UserError(f"{path}: {number} {name!r} for the {field}; there are {', '.join(names)}; {way_out}")
    return found


class Values(NamedTuple):
    """Values of columns: what messages call them, and whether a type of columns has them."""

    description: str
    are_of: Callable[[pa.DataType], bool]


def _values_of(kind: pa.DataType) -> pa.DataType:
    """The type of the values, also in a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _has_strings(kind: pa.DataType) -> bool:
    return _values_of(kind) in _BYTES


def _has_texts(kind: pa.DataType) -> bool:
    return _has_strings(kind) or bool(pa.types.is_integer(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _has_ids(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _has_lists_of_strings(kind: pa.DataType) -> bool:
    return _is_list(kind) and kind.value_type in _BYTES


_STRINGS = Values("strings", _has_strings)
_STRINGS_OR_TIMES = Values("strings", lambda kind: _has_strings(kind) or bool(pa.types.is_temporal(_values_of(kind))))
_IDS = Values("lists of integers", _has_ids)
TEXTS = Values("strings or integers", _has_texts)
LISTS_OF_STRINGS = Values("lists of strings", _has_lists_of_strings)
TEXTS_OR_LISTS = Values(
    "strings, integers or lists of strings", lambda kind: _has_texts(kind) or _has_lists_of_strings(kind)
)


def columns(
    path: str,
    schema: pa.Schema,
    wanted: Mapping[str, str],
    required: Collection[str],
    values: Mapping[str, Values] | None = None,
) -> dict[str, ColumnPath]:
    """The column of each field of `wanted` that is there and has its `values`, which are strings by default.

    Raises UserError if the column of a field in `required` doesn't exist, is there twice or has other values.
    """
    fields = _fields(schema)
    types = {name: kind for name, _, kind in fields}
    paths = {name: column for name, column, _ in fields}
    found = {}
    for field, name in present(path, [name for name, _, _ in fields], wanted, required).items():
        expected = (values or {}).get(field, _STRINGS)
        if expected.are_of(types[name]):
            found[field] = paths[name]
        elif field in required:
            inside = first_few([one for one in types if one.startswith(f"{name}.")], _SHOWN)
            option = "ids" if expected is _IDS else field
            way_out = f"; name a field of it in options: {{{option}: NAME}}, of {inside}" if inside else ""
            raise UserError(f"{path}: column {name!r} is {types[name]}, expected {expected.description}{way_out}")
    return found


def _columns(path: str, options: Options, schema: pa.Schema) -> dict[str, ColumnPath]:
    """The columns of a table of documents."""
    of_text = {"text": options.ids} if options.ids else {}
    values = {"text": _IDS if options.ids else _STRINGS, "timestamp": _STRINGS_OR_TIMES}
    return columns(path, schema, options.wanted | of_text, options.required, values)


def _values(batch: pa.RecordBatch, columns: list[ColumnPath]) -> list[tuple]:
    """The rows' strings, as bytes, integers, lists of integers, and times, as scalars: a value that Python can't read
    then spoils only its row.

    Raises ArrowInvalid for offsets or indices that point outside of the data, which Arrow would follow.
    """
    arrays = [_checked(_column(batch, path)) for path in columns]
    return list(zip(*(array if _is_time(array) else array.to_pylist() for array in arrays), strict=True))


def _column(batch: pa.RecordBatch, path: ColumnPath) -> pa.Array:
    """The values at `path`, null where a struct on the way is. Labels that datasets has names for are their names."""
    array = batch.column(path[0])
    for name in path[1:]:
        array.validate()
        array = pc.struct_field(array, [name])
    names = _names_of_labels(batch.schema).get(path[0]) if pa.types.is_integer(array.type) else None
    if names is None:
        return array
    array.validate(full=True)
    return pa.DictionaryArray.from_arrays(pc.if_else(pc.less(array, 0), None, array), names)  # -1: unknown


def _names_of_labels(schema: pa.Schema) -> dict[str, pa.Array]:
    """The names of the labels in each column that is a `ClassLabel` of datasets, by the metadata of the schema."""
    # without metadata of datasets, or with damaged metadata, labels are integers
    with contextlib.suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: pa.array(feature["names"], pa.string())
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    return {}


def _is_time(array: pa.Array) -> bool:
    return bool(pa.types.is_temporal(array.type))


def _checked(array: pa.Array) -> pa.Array:
    """A column of times, integers, lists or strings, also in a dictionary, with verified offsets and indices. Strings
    are bytes.

    One string that isn't UTF-8 would have all strings refused.
    """
    array.validate()
    if pa.types.is_dictionary(array.type):
        array.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(array.indices, _checked(array.dictionary), safe=True).dictionary_decode()
    if _has_strings(array.type):
        array = array.view(_BYTES[array.type])
    elif _has_lists_of_strings(array.type):
        array = array.cast(pa.large_list(_BYTES[array.type.value_type]))
    array.validate(full=True)
    return array


def _record(ordinal: int, row: dict[str, object], stats: ReadStats) -> Record | None:
    """The record of a row, without the values that can't be read, which are noted as damage; None without a text."""
    values = {}
    for field, value in row.items():
        try:
            values[field] = text_of_ids(value) if isinstance(value, list) else text_of(value)
        except (ValueError, OverflowError, KeyError) as error:  # bytes, years and time zones that Python doesn't have
            reason = one_line(error)
            if field == "text":
                stats.damaged(f"row {ordinal}", reason)
                return None
            stats.damaged_between(f"row {ordinal}", f"read without its {field}: {reason}")
    return record_of(ordinal, values, stats)


def text_of(value: object) -> str:
    """A value of a column as text; "" for null. Raises ValueError for bytes that aren't UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if value is None:
        return ""
    return value.isoformat() if isinstance(value, datetime) else str(value)


# a printable character follows in a text on the gene PAR1
_OF_PARQUET = Beginning(rb"PAR1(?![\t\n\r -~])", "a Parquet file", ("pairs",))
_OF_ARROW = Beginning(rb"ARROW1\0\0|\xff{4}..\0\0", "an Arrow file", ("pairs",))


class Parquet(Format):
    """Tables in Parquet."""

    options, refuses_others = Options, True
    beginning = _OF_PARQUET
    kind: ClassVar[type[ParquetTable]] = ParquetTable
    read = staticmethod(partial(read, kind))

    @staticmethod
    def head(file: BinaryIO, size: int) -> bytes:
        try:
            whole, table, sample = file.seek(0, 2), pq.ParquetFile(file), io.BytesIO()  # unreadable without its end
            rows = max(1, table.metadata.num_rows * min(size, whole) // max(1, whole))
            first = [*itertools.islice(table.iter_batches(rows), 1)]
            pq.write_table(pa.Table.from_batches(first, table.schema_arrow), sample)
            return sample.getvalue()
        except _UNREADABLE:  # reading what is left of it tells the same
            file.seek(0)
            return file.read(size)


class Arrow(Format):
    """Tables in Arrow's IPC streams and files."""

    options, refuses_others = Options, True
    beginning = _OF_ARROW
    kind: ClassVar[type[ArrowTable]] = ArrowTable
    read = staticmethod(partial(read, kind))

    @staticmethod
    def head(file: BinaryIO, size: int) -> bytes:
        try:
            table, sample, left = ArrowTable(file, advancing(None)), io.BytesIO(), size
            with pa.ipc.new_stream(sample, table.schema) as stream:
                for batch in table.batches():
                    stream.write_batch(batch.slice(0, max(1, batch.num_rows * left // max(1, batch.nbytes))))
                    if (left := left - batch.nbytes) <= 0:
                        break
            return sample.getvalue()
        except _UNREADABLE:  # as of Parquet
            file.seek(0)
            return file.read(size)


def format_of(source: BinaryIO) -> type[Parquet] | type[Arrow] | None:
    """The format of a file that is open at its start, where it stays; None: no table."""
    head = source.read(_HEAD)
    source.seek(0)
    formats = ((Parquet, _OF_PARQUET), (Arrow, _OF_ARROW))
    return next((known for known, begins in formats if re.match(begins.pattern, head, re.DOTALL)), None)
