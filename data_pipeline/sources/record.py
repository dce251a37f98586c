"""What readers share: their input, the records they yield, their notes on counts and damage, and lines of text.

Lines are read in bounded memory however long they are.
"""

import codecs
import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, ClassVar, NamedTuple, cast

from pydantic import AfterValidator, Field

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.charsets import charset_of, codec_of, detected
from data_pipeline.sources.decompress import Chunks, open_stream
from data_pipeline.text.document import Tally

_DAMAGE_KEPT = 100


class Range(NamedTuple):
    """Bytes `start` … `stop` − 1 of a file, to its end if `stop` is None.

    `first_ordinal` is the index of the range's first record among all records of the file.
    """

    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0


class Damage(NamedTuple):
    """Where a file can't be used, and why."""

    position: str
    reason: str


@dataclass(frozen=True, slots=True)
class Input:
    """A file to read (any fsspec path), or its bytes `start` … `stop` − 1 if reading can begin at `start`.

    `first_ordinal` is the index of the range's first record among all records of the file. `options` are those of the
    format in the source's config, such as names of columns. `is_sample`: only some records will be read.
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

    `ordinal` is the record's index among all records of its file, dropped ones included, so that it never depends on
    filters. `text` is as in the file (wikitext for Wikipedia), `target` belongs to a text-to-text pair, and `timestamp`
    is ISO 8601 to the precision of the file. A field that the file doesn't give is "". `hidden_namespaces` are the
    names that the wiki uses for files and categories; links to them show no text. Only evaluation reads `targets`, the
    right answers of which `target` is the first, and `choices`, answers to choose from; empty if the file has no lists.
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
    """What a reader counts in one input: `counters`, whose `read` counts every record, and `damage`.

    `damage` lists the parts that can't be used while the rest of the file can. The first hundred
    are kept, but the rule "damaged" counts every record lost. A reader that can't continue raises DamagedInput instead.
    `unchecked`: the file's format may have checksums, and the file has none.
    """

    counters: Tally = field(default_factory=Tally)
    damage: list[Damage] = field(default_factory=list)
    unchecked: bool = False

    def damaged(self, position: str, reason: str, records: int = 1) -> None:
        """Notes the loss of `records`, which the reader counts as read."""
        self.counters.document("damaged", f"{position}: {reason}", records)
        self.damaged_between(position, reason)

    def damaged_between(self, position: str, reason: str) -> None:
        """Notes that something between records is damaged or missing, so that no lost record can be counted."""
        if len(self.damage) < _DAMAGE_KEPT:
            self.damage.append(Damage(position, reason))


ReadFunction = Callable[[Input, ReadStats], Iterator[Record]]


class Source:
    """A file format of an installed package: `read` yields the records of a file, and `options` are the keys that a
    source of the format may set."""

    options: ClassVar[type[Section]] = Section

    @staticmethod
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        """Every record of `file`, whose `options` have the settings. Notes on what is damaged go to `stats`."""
        raise NotImplementedError


class FieldNames(Section):
    """Options of every format whose rows have names for their values."""

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


def record_of(ordinal: int, row: Mapping[str, str], stats: ReadStats) -> Record | None:
    """The record of a row, whose values are named as in `FieldNames`; None for one without text, which is counted."""
    text = row.get("text", "")
    if not text.strip():
        stats.counters.document("empty")
        return None
    url, title, timestamp, language = (row.get(name, "") for name in ("url", "title", "timestamp", "language"))
    return Record(ordinal, text, url, title, timestamp, language)


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
    """Longer records, in bytes, are noted as damage and skipped."""


class TextOptions(RecordOptions):
    """Options of every text format whose files don't say their encoding."""

    encoding: Annotated[str, AfterValidator(_known)] = "utf-8"
    """The encoding of the files, by Python's name: `"cp1252"`, `"gb18030"`, `"utf-16"`."""


@contextlib.contextmanager
def open_text(file: Input, options: RecordOptions) -> Iterator[BinaryIO]:
    """The content of `file` in UTF-8, without a byte order mark. Raises what `open_stream` raises, and DamagedInput, as
    soon as it is read, for bytes that aren't in the encoding.
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


def next_byte(stream: BinaryIO) -> bytes:
    """The next byte of what `open_text` yields, which stays to be read; b"" at its end."""
    return cast(io.BufferedReader, stream).peek(1)[:1]


def numbered_lines(stream: BinaryIO, limit: int, first: int = 1) -> Iterator[tuple[int, bytes | None]]:
    r"""Every line with its number, from `first`, without its end (LF or CR LF); None for a line over `limit` bytes.

    limit=3:  b"a\r\nlong\nb"  ->  (1, b"a"), (2, None), (3, b"b")
    """
    number = first - 1
    while line := stream.readline(limit + 2):
        number += 1
        if len(line) == limit + 2 and not line.endswith(b"\n"):
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        yield number, line if len(line) <= limit else None


def too_long(options: RecordOptions) -> str:
    return f"longer than max_record_bytes, {options.max_record_bytes}"


def decode(data: bytes | None, options: RecordOptions) -> str:
    """Text in UTF-8. Raises ValueError for any other, with the encoding that it looks like and the option for it, and
    for None, which is too long."""
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
    """The encoding of a file that begins with NUL bytes: in Latin script, UTF-16 has one for each character."""
    name = "utf-32" if bytes(3) in text else "utf-16"
    is_big_endian = text.startswith(b"\0") and not text.startswith(codecs.BOM_UTF32_BE)
    return f"{name}-be" if is_big_endian else name
