"""Lines of text formats, read in bounded memory however long they are."""

import codecs
import contextlib
import io
from collections.abc import Iterator
from typing import Annotated, BinaryIO, cast

from pydantic import AfterValidator
from resiliparse.parse.encoding import detect_encoding

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.decompress import Chunks, open_stream
from data_pipeline.sources.record import Input

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

    max_record_bytes: int = 64 << 20
    """Longer records, in bytes, are noted as damage and skipped."""


class TextOptions(RecordOptions):
    """Options of every text format whose files don't say their encoding."""

    encoding: Annotated[str, AfterValidator(_known)] = "utf-8"
    """The encoding of the files, by Python's name: `"cp1252"`, `"gb18030"`, `"utf-16"`."""


@contextlib.contextmanager
def open_text(file: Input, options: TextOptions) -> Iterator[BinaryIO]:
    """The content of `file` in UTF-8. Raises what `open_stream` raises, and DamagedInput, as soon as it is read, for
    bytes that aren't in the encoding.
    """
    with open_stream(file.path, file.verified) as stream:
        if codecs.lookup(options.encoding).name == "utf-8":
            yield stream
        else:
            yield cast(BinaryIO, io.BufferedReader(Chunks(_recoded(stream, file.path, options.encoding))))


def _recoded(stream: BinaryIO, path: str, encoding: str) -> Iterator[bytes]:
    decoder, position = codecs.getincrementaldecoder(encoding)(), 0
    more = True
    while more:
        more = bool(chunk := stream.read(_CHUNK))
        try:
            text = decoder.decode(chunk, final=not more).encode()
        except UnicodeError as error:
            where = f"bytes {position} to {position + len(chunk)} of the content"
            raise DamagedInput(path, where, f"isn't {encoding}: {error}") from None
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


def decode(data: bytes) -> str:
    """Text in UTF-8. Raises ValueError for any other, with the encoding that it looks like and the option for it."""
    if b"\0" in data:
        raise ValueError(f"holds NUL bytes: expected UTF-8 text{_advice(_utf16(data[:_LOOKED_AT]))}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        looks_like = detect_encoding(data[max(0, error.start - _LOOKED_AT // 2) :][:_LOOKED_AT])
        try:
            data.decode(looks_like or "utf-8")
        except (UnicodeError, LookupError):
            looks_like = None
        advice = _advice(looks_like) or "; if it has another encoding, set options: {encoding: NAME}"
        raise ValueError(f"byte {error.start} isn't UTF-8{advice}") from None


def _utf16(data: bytes) -> str | None:
    """UTF-16 if `data` begins with its mark, or if most of its characters have NUL as their upper byte."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    order = next((order for order, upper in (("le", 1), ("be", 0)) if data[upper::2].count(0) > len(data) // 4), None)
    return f"utf-16-{order}" if order else None


def _advice(encoding: str | None) -> str:
    return f"; it looks like {encoding}: set options: {{encoding: {encoding}}}" if encoding else ""
