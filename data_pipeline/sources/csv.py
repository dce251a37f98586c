"""CSV files with a header and a column of text, as RFC 4180, pandas and `Dataset.to_csv` have them."""

import csv
from collections.abc import Iterator
from typing import Annotated, BinaryIO

from pydantic import Field

from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, decode, open_text, record_of, too_long
from data_pipeline.sources.tables import Columns

csv.field_size_limit(2**31 - 1)  # of the whole process, 128 KiB by default; here `_Lines` limits records


class Options(Columns, TextOptions):
    """Names of the columns in the header. All but `text` may be absent, unless the config names them."""

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """The character between columns: `";"` in exports of many spreadsheets, `"\\t"` in .tsv files."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""A record for every row with a text; the ordinal is the row's index. Quoted fields may have line breaks.

    Counts `read` (rows that aren't blank) and `empty` (blank texts, dropped). A row with more or fewer fields than the
    header, with a misplaced quotation mark, not in the encoding or longer than `max_record_bytes` is damage. Raises
    `UserError` for a column that isn't in the header.

        b'text,url\n"One,\ntwo.",https://a.org/\n'  ->  Record(0, "One,\ntwo.", "https://a.org/")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        lines = _Lines(stream, options)
        rows = csv.reader(lines, delimiter=options.delimiter, strict=True)
        try:
            header = next(rows, [])
        except (csv.Error, _Unreadable) as error:
            raise DamagedInput(file.path, "the header", str(error)) from None
        columns = {field: header.index(name) for field, name in options.present(file.path, header).items()}
        ordinal = 0
        while True:
            lines.size, first = 0, lines.number + 1
            row, damage = list[str](), ""
            try:
                row = next(rows)
            except StopIteration:
                return
            except (csv.Error, _Unreadable) as error:
                damage = str(error)
            else:
                if not row:  # a blank line
                    continue
                if len(row) != len(header):
                    damage = f"{len(row)} fields, but the header has {len(header)}"
            stats.counters["read"] += 1
            if damage:
                stats.damaged(f"line {first}", damage)
            elif record := record_of(ordinal, {field: row[index] for field, index in columns.items()}, stats):
                yield record
            ordinal += 1


class _Unreadable(Exception):
    """A record is longer than the options allow, or a line isn't UTF-8."""


class _Lines:
    """The lines of a CSV file with their ends, which belong to quoted fields. `size`: bytes since it was set to 0."""

    def __init__(self, stream: BinaryIO, options: Options):
        self._stream, self._options, self._limit = stream, options, options.max_record_bytes
        self.number = self.size = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = part = self._stream.readline(self._limit + 2)
        while len(part) == self._limit + 2 and not part.endswith(b"\n"):
            part = self._stream.readline(self._limit + 2)
        if not line:
            raise StopIteration
        self.number += 1
        self.size += len(line)
        if len(line.rstrip(b"\r\n")) + self.size - len(line) > self._limit:
            raise _Unreadable(too_long(self._options))
        try:
            return decode(line.removeprefix(b"\xef\xbb\xbf") if self.number == 1 else line, self._options)
        except ValueError as error:
            raise _Unreadable(str(error)) from None
