"""Shared by all readers of files: their input, the records they yield, counts and damage, and decoded lines of text.

Memory stays bounded, however long a line is.
"""

import codecs
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Annotated, Any, BinaryIO, ClassVar, NamedTuple, TypeVar, cast

from pydantic import AfterValidator, Field, model_validator

from data_pipeline.base.config_file import Section
from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources.charsets import charset_of, codec_of, detected
from data_pipeline.sources.decompress import Chunks, open_stream
from data_pipeline.text.document import Tally

_DAMAGE_KEPT = 100
_SHOWN = 40  # characters of a value, in a message

Parsed = TypeVar("Parsed")


class Range(NamedTuple):
    """Bytes `start` … `stop` − 1 of a file; `stop` None: to the end of the file.

    `first_ordinal`: the index of the range's first record among all records of the file.
    """

    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0


class Damage(NamedTuple):
    """A part of a file that can't be used: where it is, and why."""

    position: str
    reason: str


@dataclass(frozen=True, slots=True)
class Input:
    """A file to read (any fsspec path), or a `Range` of it, of a format that can be read from the middle.

    `options`: the source's `options` in the corpus file, such as names of columns. `is_sample`: only some records will
    be read.
    """

    path: str
    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    is_sample: bool = False


@dataclass(slots=True)
class Record:
    """One record of an input file, before cleaning.

    A field that the file doesn't give is empty.

    Attributes:
        ordinal: the record's index among all records of its file. It counts dropped records, so no filter changes it.
        text: the text as the file has it (wikitext for Wikipedia); of a text-to-text pair, the input.
        timestamp: in ISO 8601, to the precision of the file.
        target: of a text-to-text pair, the target.
        targets: all right answers, for evaluation; `target` is the first.
        choices: the answers to choose from, for evaluation.
        hidden_namespaces: the wiki's names for files and categories; links to them show no text.
    """

    ordinal: int
    text: str
    url: str = ""
    title: str = ""
    timestamp: str = ""
    language: str = ""
    target: str = ""
    targets: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    hidden_namespaces: frozenset[str] = frozenset()


@dataclass(slots=True)
class ReadStats:
    """Counts and damage of one input. A reader that can't continue raises DamagedInput instead of noting damage.

    Attributes:
        counters: `read` counts every record, and the rule "damaged" every lost record.
        damage: the first hundred damaged parts.
    """

    counters: Tally = field(default_factory=Tally)
    damage: list[Damage] = field(default_factory=list)

    def damaged(self, position: str, reason: str, records: int = 1) -> None:
        """Notes that `records` are lost. The reader itself counts them as read."""
        self.counters.document("damaged", f"{position}: {reason}", records)
        self.damaged_between(position, reason)

    def damaged_between(self, position: str, reason: str) -> None:
        """Notes damage between records, which loses no record that could be counted."""
        if len(self.damage) < _DAMAGE_KEPT:
            self.damage.append(Damage(position, reason))


ReadFunction = Callable[[Input, ReadStats], Iterator[Record]]


class Source:
    """A file format of an installed package. `options`: the keys that a source may set under `options`."""

    options: ClassVar[type[Section]] = Section

    @staticmethod
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        """Yields every record of `file`; `file.options` has the settings. Notes damage in `stats`."""
        raise NotImplementedError


class FieldNames(Section):
    """Options of every format with named columns or keys."""

    text: str = "text"
    """Column or key of the text."""
    url: str = "url"
    """Column or key of the URL."""
    title: str = "title"
    """Column or key of the title."""
    language: str = "language"
    """Column or key of the language."""
    timestamp: str = "timestamp"
    """Column or key of the timestamp, by which `dedup.urls` chooses the newest page."""


class IdsOption(Section):
    """An option of formats whose values may be lists."""

    ids: str = ""
    """Column or key of a list of integers, which is the document instead of a text, with `tokenizer: {kind: ids}`."""

    @model_validator(mode="after")
    def _is_instead_of_text(self) -> "IdsOption":
        if self.ids and "text" in self.model_fields_set:
            raise ValueError("text and ids: a document has one of them")
        return self


def text_of_ids(ids: object) -> str:
    """[3, 17, 255]  ->  "3 17 255". None has no ids. Raises ValueError for anything but integers from 0 on."""
    if ids is None:
        return ""
    if not isinstance(ids, list):
        raise ValueError(f"expected a list of integers, found {_shown(ids)}")
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        place, wrong = next((place, one) for place, one in enumerate(ids) if type(one) is not int or one < 0)
        raise ValueError(f"expected integers from 0 on, found {_shown(wrong)} at place {place}")
    return " ".join(map(str, ids))


def _shown(value: object) -> str:
    return json.dumps(value)[:_SHOWN]


def record_of(ordinal: int, row: Mapping[str, Any], stats: ReadStats) -> Record | None:
    """The record of a row, whose keys are fields of `FieldNames`. None if its text is blank: it counts as `empty`."""
    if row["text"].strip():
        return Record(ordinal, **row)
    stats.counters.document("empty")
    return None


_CHUNK = 1 << 18
_LOOKED_AT = 1 << 16  # bytes from which an encoding is guessed


def _known(encoding: str) -> str:
    try:
        "".encode(encoding)  # not only looked up: base64 is a codec, but no encoding of text
    except LookupError:
        raise ValueError(f"Python has no encoding {encoding!r}") from None
    return encoding


class RecordOptions(Section):
    """Options of every text format."""

    max_record_bytes: int = Field(64 << 20, gt=0, le=1 << 33)  # a record is in memory as a whole
    """Maximum size of a record, in bytes. Longer records are damage and are skipped."""


class TextOptions(RecordOptions):
    """Options of text formats whose files don't name their encoding."""

    encoding: Annotated[str, AfterValidator(_known)] = "utf-8"
    """The encoding of the files, by Python's name: `"cp1252"`, `"gb18030"`, `"utf-16"`."""


@contextlib.contextmanager
def open_text(file: Input, options: RecordOptions) -> Iterator[BinaryIO]:
    """The content of `file` in UTF-8, without a byte order mark.

    Raises what `open_stream` raises. A read of bytes that aren't in the encoding raises DamagedInput.
    """
    with open_stream(file.path) as content:
        stream = cast(io.BufferedReader, content)
        encoding = options.encoding if isinstance(options, TextOptions) else "utf-8"
        if codecs.lookup(encoding).name != "utf-8":
            stream = io.BufferedReader(Chunks(_recoded(content, file.path, encoding)))
        if stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        yield cast(BinaryIO, stream)


def _recoded(stream: BinaryIO, path: str, encoding: str) -> Iterator[bytes]:
    decoder, position = codecs.getincrementaldecoder(encoding)(), 0
    more = True
    while more:
        more = bool(chunk := stream.read(_CHUNK))
        try:
            text = decoder.decode(chunk, final=not more).encode()
        except UnicodeError as error:
            where = f"bytes {position} to {position + len(chunk)} of the content"
            charset = charset_of(encoding) or ""
            way_out = f"; {wider} has more characters" if (wider := codec_of(charset)) != charset else ""
            raise DamagedInput(path, where, f"isn't {encoding}: {error}{way_out}") from None
        position += len(chunk)
        if text:
            yield text


def next_bytes(stream: BinaryIO) -> bytes:
    """The next bytes of a stream of `open_text`, without consuming them; b"" at the end."""
    return cast(io.BufferedReader, stream).peek(1)


def first_character(stream: BinaryIO) -> tuple[bytes, BinaryIO]:
    r"""The first byte that isn't white space in a stream of `open_text`, and a stream with the same content.

    b"" if the content begins with `_CHUNK` bytes of white space.

        b"\n {}"  ->  b"{"
    """
    head = next_bytes(stream)
    if not head.strip():
        head = b""
        while len(head) < _CHUNK and not head.strip() and (more := cast(io.BufferedReader, stream).read1(_CHUNK)):
            head += more
        rest = iter(partial(stream.read, _CHUNK), b"")
        stream = cast(BinaryIO, io.BufferedReader(Chunks(chain([head] if head else [], rest))))
    return head.lstrip()[:1], stream


def numbered_lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    r"""(number, line) of every line, without LF or CR LF. A line of more than `limit` bytes is None.

    limit=3:  b"a\r\nlong\nb"  ->  (1, b"a"), (2, None), (3, b"b")
    """
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        if len(line) == limit + 2 and not line.endswith(b"\n"):
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        yield number, line if len(line) <= limit else None


def parsed_lines(
    stream: BinaryIO,
    stats: ReadStats,
    options: RecordOptions,
    parse: Callable[[str], Parsed],
    blank: bytes | None = None,
) -> Iterator[tuple[int, Parsed]]:
    """(number from 1, parsed text) of every line that isn't blank. Such lines count as `read`.

    A line is damage if it isn't text, or if `parse` raises ValueError. `blank`: the bytes of a blank line; None: white
    space.
    """
    for number, line in numbered_lines(stream, options.max_record_bytes):
        if line is None or line.strip(blank):
            stats.counters.read += 1
            try:
                parsed = parse(decode(line, options))
            except ValueError as error:
                stats.damaged(f"line {number}", str(error))
            else:
                yield number, parsed


def too_long(options: RecordOptions) -> str:
    return f"longer than max_record_bytes, {options.max_record_bytes}"


def decode(data: bytes | None, options: RecordOptions) -> str:
    """The text of UTF-8 `data`.

    Raises ValueError for other bytes, with the encoding that they look like and the option to set, and for None, which
    stands for a record that is too long.
    """
    if data is None:
        raise ValueError(too_long(options))
    has_option = isinstance(options, TextOptions)
    if b"\0" in data:
        name = wide_encoding(data)
        way_out = f"for {name.upper()} set options: {{encoding: {name}}}" if has_option else f"it may be {name.upper()}"
        raise ValueError(f"holds NUL bytes: expected UTF-8 text; {way_out}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        looks_like = codec_of(detected(data[max(0, error.start - _LOOKED_AT // 2) :][:_LOOKED_AT]))
        try:
            data.decode(looks_like)
        except (UnicodeError, LookupError):
            looks_like = ""
        advice = f"it looks like {looks_like}" if looks_like else "if it has another encoding"
        option = f"set options: {{encoding: {looks_like or 'NAME'}}}" if has_option else "convert it to UTF-8"
        raise ValueError(f"byte {error.start} isn't UTF-8; {advice}: {option}") from None


def wide_encoding(text: bytes) -> str:
    """The encoding of text with NUL bytes: UTF-16 has one for each Latin letter, UTF-32 has three."""
    name = "utf-32" if bytes(3) in text else "utf-16"
    is_big_endian = text.startswith(b"\0") and not text.startswith(codecs.BOM_UTF32_BE)
    return f"{name}-be" if is_big_endian else name
