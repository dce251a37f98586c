"""Plain text: the reader that makes documents of files, paragraphs or lines."""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from pydantic import Field

from data_pipeline.sources.format import Format
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, decode, numbered_lines, open_text

_BLANK_LINE = re.compile(rb"\n[^\S\n]*(?=\n)")  # without its own line break
_TOGETHER, _MOST_TOGETHER = 128 << 20, 4096  # bytes and documents of a file that stay in order: less than a shard


class Options(TextOptions):
    """The `options` of a source of plain text."""

    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What becomes a document: the whole file, a paragraph (the lines up to a blank one) or a line. Documents are
    shuffled, so the paragraphs of a file stay in order only with `document`."""
    max_document_bytes: int = Field(8 << 20, ge=4, le=1 << 33)
    """Maximum size of a document, in bytes, with `sample_by: document`. A larger file is cut at blank lines into
    documents that follow each other in the rows."""

    @property
    def together(self) -> int:
        """Number of consecutive documents of a file that follow each other in the rows."""
        if self.sample_by != "document":
            return 1
        return min(_MOST_TOGETHER, max(1, _TOGETHER // self.max_document_bytes))


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""Every file, paragraph or line that isn't blank; the ordinal is its index among them.

    Counts `read`. A record in another encoding, or longer than `max_record_bytes`, is damage.

        sample_by=paragraph:  b"One,\ntwo.\n\n\nThree.\n"  ->  Record(0, "One,\ntwo."), Record(1, "Three.")
    """
    options = Options(**file.options)
    samples = {"document": _documents, "paragraph": _paragraphs, "line": _lines}[options.sample_by]
    with open_text(file, options) as stream:
        for ordinal, (position, sample) in enumerate(samples(stream, options)):
            stats.counters.read += 1
            try:
                text = decode(sample, options)
            except ValueError as error:
                stats.damaged(position, str(error))
            else:
                yield Record(ordinal, text)


_Samples = Iterator[tuple[str, bytes | None]]


def _lines(stream: BinaryIO, options: Options) -> _Samples:
    for number, line in numbered_lines(stream, options.max_record_bytes):
        if line is None or line.strip():
            yield f"line {number}", line


def _paragraphs(stream: BinaryIO, options: Options) -> _Samples:
    limit = options.max_record_bytes
    first, size, lines = 0, 0, list[bytes]()
    for number, line in numbered_lines(stream, limit):
        if line is not None and not line.strip():
            if size:
                yield f"line {first}", b"\n".join(lines) if size <= limit + 1 else None
            size, lines = 0, []
            continue
        first = first if size else number
        size += limit + 2 if line is None else len(line) + 1
        if size > limit + 1:  # too long: keep nothing, but look for the end
            lines = []
        elif line is not None:
            lines.append(line)
    if size:
        yield f"line {first}", b"\n".join(lines) if size <= limit + 1 else None


def _documents(stream: BinaryIO, options: Options) -> _Samples:
    """The whole file, or consecutive chunks of at most `max_document_bytes`. Together the chunks are the file."""
    size, start, data = options.max_document_bytes, 0, b""
    while data := data + _read_up_to(stream, size + 1 - len(data)):
        end = _end_of_chunk(data, size) if len(data) > size else len(data)
        chunk, data = data[:end], data[end:]
        if chunk.strip():
            position = f"bytes {start} to {start + end - 1}" if start or data else "the whole file"
            yield position, chunk if len(chunk) <= options.max_record_bytes else None
        start += end


def _end_of_chunk(data: bytes, size: int) -> int:
    """The bytes of `data` that a chunk takes, at most `size`: it ends after the last blank line or, without one, after
    the last line, word or character."""
    blank = max((found.end() + 1 for found in _BLANK_LINE.finditer(data, 0, size)), default=0)
    if end := blank or data.rfind(b"\n", 0, size) + 1 or data.rfind(b" ", 0, size) + 1:
        return end
    while size > 1 and data[size] & 0xC0 == 0x80:  # within a character of UTF-8
        size -= 1
    return size


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    """At most `size` bytes, read in chunks: one call would allocate `size` bytes even for the smallest file."""
    chunks = []
    while size and (chunk := stream.read(min(size, 1 << 18))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


class PlainText(Format):
    """Text without a form of its own."""

    options, refuses_others = Options, True
    read = staticmethod(read)

    @staticmethod
    def stays_together(options: dict[str, Any]) -> int:
        return Options(**options).together
