"""CSV files with a header and a column of text, as RFC 4180, pandas and `Dataset.to_csv` write them.

Behind a row that isn't valid CSV, the lines of a quoted field may look like rows. So the file ends there: no line of a
text becomes a document.
"""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import Field

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.sources.format import Format
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, decode, open_text, record_of, too_long
from data_pipeline.sources.tables import Columns

csv.field_size_limit(2**31 - 1)  # for the whole process; the default is 128 KiB, and `_Lines` limits rows itself

_HEAD = 1 << 18  # bytes of a file by which its options are guessed
_DELIMITERS = ",;\t|"
_GUESSES = (*({"delimiter": one} for one in _DELIMITERS), {"delimiter": "\t", "quoting": "QUOTE_NONE"})


class Options(Columns, TextOptions):
    """Names of the columns in the header. All but `text` may be absent, unless the config names them."""

    max_record_bytes: int = Field(64 << 20, gt=0, le=1 << 33)
    """Maximum size of a row, in bytes. A longer row is damage that ends the file."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """The character between columns: `";"` in exports of many spreadsheets, `"\\t"` in .tsv files."""
    doublequote: bool = True
    """Whether two quotation marks in a quoted field mean one."""
    escapechar: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """The character that makes the next one ordinary: `"\\\\"` in exports of MySQL and Spark. `null`: off."""
    quoting: Literal["QUOTE_MINIMAL", "QUOTE_NONE"] = "QUOTE_MINIMAL"
    """`QUOTE_NONE`: a quotation mark is an ordinary character, and every line is a row, as in many .tsv files."""

    @property
    def dialect(self) -> dict[str, Any]:
        """The arguments of Python's `csv.reader`."""
        names = ("delimiter", "doublequote", "escapechar")
        return {name: getattr(self, name) for name in names} | {"quoting": getattr(csv, self.quoting), "strict": True}


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""A record for every row with a text; the ordinal is the row's index. Quoted fields may have line breaks.

    Counts `read` (rows that aren't blank) and `empty` (blank texts, dropped). A row in another encoding, or with more
    or fewer fields than the header, is damage. Raises DamagedInput, which names the line, at the first row that isn't
    valid CSV or is longer than `max_record_bytes`, and UserError for a column that isn't in the header.

        b'text,url\n"One,\ntwo.",https://a.org/\n'  ->  Record(0, "One,\ntwo.", "https://a.org/")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        rows = _rows(stream, options, file.path)
        header = _header(rows, file.path)
        other = next((one for one in _DELIMITERS if one in header[0]), "") if len(header) == 1 else ""
        if other and options.text not in header:
            way_out = f"for another delimiter set options: {{delimiter: {json.dumps(other)}}}"
            raise UserError(f"{file.path}: has only the column {header[0]!r}; {way_out}")
        columns = {field: header.index(name) for field, name in options.present(file.path, header).items()}
        for ordinal, row in enumerate(rows):
            damage = row.undecodable
            if not damage and len(row.fields) != len(header):
                damage = f"{len(row.fields)} fields, but the header has {len(header)}"
            stats.counters.read += 1
            if damage:
                stats.damaged(f"line {row.line}", damage)
            elif record := record_of(ordinal, {field: row.fields[index] for field, index in columns.items()}, stats):
                yield record


def names(path: str, options: dict[str, Any]) -> list[str]:
    """The fields of the first row. Raises DamagedInput if it can't be read."""
    of_format = Options(**options)
    with open_text(Input(path), of_format) as stream:
        return _header(_rows(stream, of_format, path), path)


def guessed_options(path: str) -> dict[str, Any]:
    """The options that the first rows of a file need; {} if the rows don't show them or aren't UTF-8."""
    with open_text(Input(path), TextOptions()) as stream:
        head = stream.read(_HEAD)
    return guess(head[: head.rfind(b"\n") + 1 or None].decode(errors="replace"))[0]


def guess(text: str) -> tuple[dict[str, Any], list[list[str]]]:
    """(options, rows): of the options that give all rows of `text` the same number of columns, those with the most.

    If no options do that, those with the most columns in the first row.
    """
    found: list[tuple[dict[str, str], list[list[str]]]] = []
    for options in _GUESSES:
        rows: list[list[str]] = []
        with suppress(csv.Error):
            rows.extend(row for row in csv.reader(io.StringIO(text, ""), **Options(**options).dialect) if row)
        if rows:
            found.append((options, rows))
    regular = [one for one in found if len({len(row) for row in one[1]}) == 1]
    possible = regular or [one for one in found if "quoting" not in one[0]]
    if not possible:
        return {}, [[]]
    options, rows = max(possible, key=lambda one: _size(one[1]))
    return {} if options == _GUESSES[0] else options, rows


def _size(rows: list[list[str]]) -> tuple[int, int]:
    """(columns, rows); 0 rows for one column, which any delimiter gives."""
    return len(rows[0]), len(rows) if len(rows[0]) > 1 else 0


class _Row(NamedTuple):
    """A row. `line`: the number of its first line. `undecodable`: why its text isn't in the encoding, or ""."""

    line: int
    fields: list[str]
    undecodable: str


def _rows(stream: BinaryIO, options: Options, path: str) -> Iterator[_Row]:
    """Every row that isn't blank. Raises DamagedInput at the first row that isn't valid CSV or is too long."""
    lines, tabs = _Lines(stream, options), 0
    reader = csv.reader(iter(lines.next, None), **options.dialect)
    while True:
        lines.of_row, lines.size, lines.undecodable = [], 0, ""
        first = reader.line_num + 1
        try:
            fields = next(reader)
            if tabs and len(lines.of_row) > 1 and all(line.count(b"\t") == tabs for line in lines.of_row):
                raise csv.Error("a quoted field holds whole rows")
        except StopIteration:
            return
        except _TooLong as error:
            raise DamagedInput(path, f"line {first}", str(error)) from None
        except csv.Error as error:
            last = first + len(lines.of_row) - 1
            where = f"lines {first} to {last}" if last > first else f"line {first}"
            raise DamagedInput(path, where, _explained(error, lines.of_row, options)) from None
        if fields:
            if not tabs and (options.delimiter, options.quoting) == ("\t", "QUOTE_MINIMAL"):
                tabs = len(fields) - 1
            yield _Row(first, fields, lines.undecodable)


def _header(rows: Iterator[_Row], path: str) -> list[str]:
    header = next(rows, _Row(1, [], ""))
    if header.undecodable:
        raise DamagedInput(path, f"line {header.line}", header.undecodable)
    return header.fields


class _TooLong(Exception):
    """A row is longer than the options allow."""


class _Lines:
    """The lines of a CSV file, with their line breaks, which may belong to quoted fields.

    Attributes:
        of_row: the lines of the row that is being read.
        size: their bytes.
        undecodable: why the first of them that isn't in the encoding isn't; "" if all are.
    """

    def __init__(self, stream: BinaryIO, options: Options):
        self._stream, self._options = stream, options
        self.of_row, self.size, self.undecodable = list[bytes](), 0, ""

    def next(self) -> str | None:
        """The next line; None at the end. Raises _TooLong."""
        most = self._options.max_record_bytes
        if not (line := self._stream.readline(most + 2)):
            return None
        self.of_row.append(line)
        if self.size + len(line.rstrip(b"\r\n")) > most:
            raise _TooLong(too_long(self._options))
        self.size += len(line)
        try:
            return decode(line, self._options)
        except ValueError as error:  # reported with the row, whose end must still be found
            self.undecodable = self.undecodable or str(error)
            return line.decode(errors="replace")


def _explained(error: csv.Error, lines: list[bytes], options: Options) -> str:
    """Why a row of these `lines` isn't valid CSV, and which option may read it."""
    reason = str(error)
    if "unexpected end" in reason:
        reason = "the field that a quotation mark opens has no end"
    if "new-line" in reason:
        return "a carriage return in a field that isn't quoted"
    if options.quoting == "QUOTE_NONE":
        return reason
    if options.delimiter == "\t":
        return f"{reason}; if the file quotes nothing, set options: {{quoting: QUOTE_NONE}}"
    if options.escapechar is None and any(b'\\"' in line for line in lines):
        return f'{reason}; for a backslash before quotation marks set options: {{escapechar: "\\\\"}}'
    return f"{reason}; a quotation mark inside a quoted field is written twice"


class Csv(Format):
    """Tables as text, with a line of names."""

    options, refuses_others = Options, True
    read = staticmethod(read)
