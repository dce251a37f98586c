"""CSV files with a header and a column of text, as RFC 4180, pandas and `Dataset.to_csv` write them.

Behind a row that can't be parsed, the lines of a quoted field may look like rows. So reading resumes at the next line
where a row begins for certain. The quotation marks behind the line decide that (after Ge et al., "Speculative
Distributed CSV Data Parsing for Big Data Analytics", SIGMOD 2019).
"""

import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import Field

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, decode, open_text, record_of, too_long
from data_pipeline.sources.tables import Columns

csv.field_size_limit(2**31 - 1)  # for the whole process; the default is 128 KiB, and `_Rows` limits rows itself

_SURE_ROWS, _FAR = 3, 16 << 20  # rows, and bytes without a quotation mark, that show where a row begins
_HEAD = 1 << 18  # bytes of a file by which its options are guessed
_DELIMITERS = ",;\t|"
_GUESSES = (*({"delimiter": one} for one in _DELIMITERS), {"delimiter": "\t", "quoting": "QUOTE_NONE"})


class Options(Columns, TextOptions):
    """Names of the columns in the header. All but `text` may be absent, unless the config names them."""

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

    Counts `read` (rows that aren't blank) and `empty` (blank texts, dropped). These rows are damage: with more or fewer
    fields than the header, with a misplaced quotation mark, in another encoding, longer than `max_record_bytes`. Lines
    after a damaged row, up to the next certain beginning of a row, belong to the damage. Raises `UserError` for a
    column that isn't in the header.

        b'text,url\n"One,\ntwo.",https://a.org/\n'  ->  Record(0, "One,\ntwo.", "https://a.org/")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        rows = _Rows(stream, options).rows()
        header = _header(rows, file.path)
        other = next((one for one in _DELIMITERS if one in header[0]), "") if len(header) == 1 else ""
        if other and options.text not in header:
            way_out = f"for another delimiter set options: {{delimiter: {json.dumps(other)}}}"
            raise UserError(f"{file.path}: has only the column {header[0]!r}; {way_out}")
        columns = {field: header.index(name) for field, name in options.present(file.path, header).items()}
        for ordinal, row in enumerate(rows):
            damage = row.damage
            if not damage and len(row.fields) != len(header):
                damage = f"{len(row.fields)} fields, but the header has {len(header)}"
            stats.counters.read += 1
            if damage:
                stats.damaged(row.lines, damage)
            elif record := record_of(ordinal, {field: row.fields[index] for field, index in columns.items()}, stats):
                yield record


def names(path: str, options: dict[str, Any]) -> list[str]:
    """The fields of the first row. Raises DamagedInput if it can't be read."""
    of_format = Options(**options)
    with open_text(Input(path), of_format) as stream:
        return _header(_Rows(stream, of_format).rows(), path)


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
    """A row. `lines`: where it is, "line 3", or "lines 3 to 7" with the lines that are left out behind it."""

    lines: str
    fields: list[str]
    damage: str


def _header(rows: Iterator[_Row], path: str) -> list[str]:
    header = next(rows, _Row("", [], ""))
    if header.damage:
        raise DamagedInput(path, "the header", header.damage)
    return header.fields


class _TooLong(Exception):
    """A row is longer than the options allow."""


class _Rows:
    """Parses a CSV file. Lines keep their line breaks, which may belong to quoted fields."""

    def __init__(self, stream: BinaryIO, options: Options):
        self._stream, self._options, self._limit = stream, options, options.max_record_bytes
        self._pattern = _line_pattern(options)
        self._again = deque[bytes]()  # lines to be read before those of the stream
        self._tabs, self._ended = 0, False
        self._own, self._size, self._undecodable = list[bytes](), 0, ""  # the lines of the row that is being read

    def rows(self) -> Iterator[_Row]:
        """Every row that isn't blank."""
        reader, before = csv.reader(iter(self._next_line, None), **self._options.dialect), 0
        while True:
            self._own, self._size, self._undecodable = [], 0, ""
            fields, damage, whole = list[str](), "", False
            try:
                fields = next(reader)
                damage = self._undecodable
                if whole := len(self._own) > 1 and self._holds_rows():
                    raise csv.Error("a quoted field holds whole rows")
                lines, where = len(self._own), f"line {before + 1}"
            except StopIteration:
                return
            except (csv.Error, _TooLong) as error:
                damage = str(error) if isinstance(error, _TooLong) else self._explained(error)
                if whole:
                    self._again.extendleft(reversed(self._own[1:]))
                    del self._own[1:]
                left_out = self._left_out()
                lines = len(self._own) + left_out
                where = f"lines {before + 1} to {before + lines}" if left_out else f"line {before + 1}"
            before += lines
            if self._tabs == 0 and self._options.delimiter == "\t":
                self._tabs = len(fields) - 1
            if fields or damage:
                yield _Row(where, fields, damage)

    def _next_line(self) -> str | None:
        line = self._again.popleft() if self._again else self._read()
        if not line:
            self._ended = True
            return None
        self._own.append(line)
        self._size += len(line)
        if self._size - len(line) + len(line.rstrip(b"\r\n")) > self._limit:
            raise _TooLong(too_long(self._options))
        try:
            return decode(line, self._options)
        except ValueError as error:  # reported with the row, whose end must still be found
            self._undecodable = self._undecodable or str(error)
            return line.decode(errors="replace")

    def _read(self) -> bytes:
        """A line of the stream. A line that is too long is cut, two bytes above the limit."""
        most = self._limit + 2
        line = part = self._stream.readline(most)
        while len(part) == most and not part.endswith(b"\n"):
            part = self._stream.readline(most)
        return line

    def _holds_rows(self) -> bool:
        """Whether each line of a row is a row itself, since the .tsv file quotes nothing."""
        quotes = self._options.quoting == "QUOTE_MINIMAL"
        return quotes and self._tabs > 0 and all(line.count(b"\t") == self._tabs for line in self._own)

    def _explained(self, error: csv.Error) -> str:
        options = self._options
        reason = "the field that a quotation mark opens has no end" if self._ended else str(error)
        if "new-line" in reason:
            return "a carriage return in a field that isn't quoted"
        if options.quoting == "QUOTE_NONE":
            return reason
        if options.delimiter == "\t":
            return f"{reason}; if the file quotes nothing, set options: {{quoting: QUOTE_NONE}}"
        if options.escapechar is None and any(b'\\"' in line for line in self._own):
            return f'{reason}; for a backslash before quotation marks set options: {{escapechar: "\\\\"}}'
        return f"{reason}; a quotation mark inside a quoted field is written twice"

    def _left_out(self) -> int:
        """Leaves out the lines behind a damaged row, up to the next certain beginning of a row or the end of the file.
        Returns their number."""
        left_out = 0
        while passed := self._passed():
            left_out += passed
            for _ in range(passed):
                self._again.popleft()
        return left_out

    def _passed(self) -> int:
        """Number of the next lines at which no row begins; 0 if a row certainly begins at the next, and at the end of
        the file.

        A row begins there if the next lines are valid rows, but not valid as the rest of a quoted field: the next
        quotation mark can't close one.
        """
        if self._options.quoting == "QUOTE_NONE":
            return 0
        # whether a field is open at the end of the line; None: the line isn't valid CSV
        outside: bool | None = False  # if no quoted field was open before the first line
        inside: bool | None = True  # if one was
        rows, size, row_at = 0, 0, 0
        for at, line in enumerate(self._following()):
            row_at = row_at if outside else at
            if b'"' in line:
                outside = self._open_after(line, bool(outside))
                inside = inside if inside is None else self._open_after(line, inside)
            rows += outside is False and bool(line.strip())
            size += len(line)
            if outside is None or (size > _FAR and not rows):
                return row_at + 1
            if (rows >= _SURE_ROWS and inside is None) or size > _FAR:
                return 0
        is_row = outside is False and inside is not False
        return row_at + 1 if size and not is_row else 0

    def _following(self) -> Iterator[bytes]:
        """The next lines, which stay to be read."""
        yield from self._again
        while line := self._read():
            self._again.append(line)
            yield line

    def _open_after(self, line: bytes, is_open: bool) -> bool | None:
        """Whether a quoted field is open at the end of `line`. `is_open`: one is at its start. None: not valid CSV."""
        found = self._pattern.match(('"' if is_open else "") + line.decode(errors="replace"))
        return None if found is None else found["open"] is not None


def _line_pattern(options: Options) -> re.Pattern[str]:
    """A line that begins outside of a quoted field, where fields with quotation marks are quoted (RFC 4180)."""
    delimiter, escape = re.escape(options.delimiter), re.escape(options.escapechar or "")
    escaped = f"{escape}." if escape else "(?!)"
    quoted = rf'"[^"{escape}]*+(?:(?:{escaped}|{chr(34) * 2 if options.doublequote else "(?!)"})[^"{escape}]*+)*+'
    plain = rf'(?:[^"{delimiter}{escape}\r\n]++|{escaped})*+'
    field = rf'(?:{quoted}"|{plain})'
    return re.compile(rf"(?:{field}{delimiter})*+(?:(?P<open>{quoted}\Z)|{field}[\r\n]*\Z)", re.DOTALL)
