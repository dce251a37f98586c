"""Arrow files with a column of text: IPC streams, as `datasets.save_to_disk` writes them, and IPC files (Feather)."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_pipeline.foundation.errors import DamagedInput, one_line
from data_pipeline.foundation.progress import advance
from data_pipeline.sources.columns import UNREADABLE, Columns, columns_of, records
from data_pipeline.sources.compression.decompress import open_for_random_access
from data_pipeline.sources.record import Input, Intake, Record

_FILE = b"ARROW1"  # how an IPC file begins; a stream doesn't
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read(file: Input, intake: Intake) -> Iterator[Record]:
    """A record for every row with a text, a record batch at a time; the ordinal is the row's index.

    Counts `read` (rows) and `empty` (null or blank texts, dropped). A row that isn't UTF-8 is damage. Raises
    `UserError` for a column that doesn't exist or has no strings. Raises `DamagedInput` where a batch can't be read,
    since the next one can't be found then, and at the end of a stream without its end-of-stream marker.

        text: "Hello.", url: "https://a.org/"  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = Columns(**file.options)
    with open_for_random_access(file.path) as source:
        ordinal, batches = 0, _batches(source)
        try:
            columns = columns_of(file.path, next(batches), options)
        except UNREADABLE as error:
            raise DamagedInput(file.path, "its schema", one_line(error)) from None
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                rows = batch.select(list(set(columns.values())))
                for column in rows.columns:
                    column.validate()
            except UNREADABLE as error:
                raise DamagedInput(file.path, f"row {ordinal}", one_line(error)) from None
            for record in records(rows, columns, ordinal, intake):
                if record:
                    yield record
            ordinal += len(rows)


def names(path: str) -> list[str]:
    """The names of the columns."""
    with open_for_random_access(path) as source:
        return list(next(_batches(source)).names)


def _batches(source: Any) -> Iterator[Any]:
    """The schema, then every record batch."""
    begins = source.read(len(_FILE))
    source.seek(0)
    if begins == _FILE:
        file = pa.ipc.open_file(source)
        yield file.schema
        for number in range(file.num_record_batches):
            yield file.get_batch(number)
        return
    stream = pa.ipc.open_stream(source)
    yield stream.schema
    position = 0
    for batch in stream:
        advance(source.tell() - position)
        position = source.tell()
        yield batch
    source.seek(-min(len(_END_OF_STREAM), position), 2)
    if source.read() != _END_OF_STREAM:
        raise pa.ArrowInvalid("the stream ends without its end-of-stream marker; the file may be cut off")
