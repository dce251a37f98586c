"""Parquet files with a column of text."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.foundation.errors import DamagedInput, one_line
from data_pipeline.foundation.progress import advance
from data_pipeline.sources.columns import UNREADABLE, Columns, columns_of, records
from data_pipeline.sources.compression.decompress import open_for_random_access
from data_pipeline.sources.record import Input, Intake, Record

_ROWS = 1024  # per batch
_BUFFER = 1 << 20


def read(file: Input, intake: Intake) -> Iterator[Record]:
    """A record for every row with a text, a batch at a time; the ordinal is the row's index.

    Counts `read` (rows) and `empty` (null or blank texts, dropped). A row that isn't UTF-8 is damage. If part of a row
    group can't be read, its remaining rows are damage too. Pages that have checksums are checked against them. Raises
    `UserError` for a column that doesn't exist or has no strings, `DamagedInput` for a file that isn't Parquet or has
    lost its footer.

        text: "Hello.", url: "https://a.org/"  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = Columns(**file.options)
    with open_for_random_access(file.path) as source:
        try:
            parquet = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)
            columns = columns_of(file.path, parquet.schema_arrow, options)
        except UNREADABLE as error:
            raise DamagedInput(file.path, "its footer", one_line(error)) from None
        ordinal = 0
        for group in range(parquet.num_row_groups):
            described = parquet.metadata.row_group(group)
            end = ordinal + described.num_rows
            try:
                for batch in parquet.iter_batches(_ROWS, [group], list(set(columns.values()))):
                    for record in records(batch, columns, ordinal, intake):
                        ordinal += 1
                        if record:
                            yield record
                if ordinal != end:
                    raise pa.ArrowInvalid(f"ends after row {ordinal}")
            except UNREADABLE as error:
                lost = end - ordinal
                intake.damaged(f"rows {ordinal} to {end - 1}, row group {group}", one_line(error))
                intake.counters["damaged"] += lost - 1
                intake.counters["read"] += lost
                ordinal = end
            advance(sum(described.column(index).total_compressed_size for index in range(described.num_columns)))


def names(path: str) -> list[str]:
    """The names of the columns."""
    with open_for_random_access(path) as source:
        return list(pq.ParquetFile(source).schema_arrow.names)
