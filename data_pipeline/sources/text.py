"""Plain text, UTF-8."""

from collections.abc import Iterator
from typing import BinaryIO, Literal

from data_pipeline.sources.compression.stream import open_stream
from data_pipeline.sources.lines import RecordOptions, decode, numbered_lines, too_long
from data_pipeline.sources.record import Input, Intake, Record

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Options(RecordOptions):
    """The `options` of a source of plain text."""

    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What becomes a document: a line, a paragraph (the lines up to a blank one) or the whole file."""


def read(file: Input, intake: Intake) -> Iterator[Record]:
    r"""Every line, paragraph or file that isn't blank; the ordinal is its index among those.

    Counts `read`, and `undecodable` (bytes that aren't UTF-8 become U+FFFD). A record with NUL bytes (UTF-16, or
    not text at all) or longer than `max_record_bytes` is damage.

        sample_by=paragraph:  b"One,\ntwo.\n\n\nThree.\n"  ->  Record(0, "One,\ntwo."), Record(1, "Three.")
    """
    options = Options(**file.options)
    samples = {"line": _lines, "paragraph": _paragraphs, "document": _document}[options.sample_by]
    with open_stream(file.path) as stream:
        for ordinal, (position, sample) in enumerate(samples(stream, options.max_record_bytes)):
            intake.counters["read"] += 1
            if sample is None:
                intake.damaged(position, too_long(options))
            elif b"\0" in sample:
                intake.damaged(position, "holds NUL bytes: expected UTF-8 text")
            else:
                text = decode(sample.removeprefix(_BYTE_ORDER_MARK) if ordinal == 0 else sample, intake)
                yield Record(ordinal, text)


_Samples = Iterator[tuple[str, bytes | None]]


def _lines(stream: BinaryIO, limit: int) -> _Samples:
    for number, line in numbered_lines(stream, limit):
        if line is None or line.strip():
            yield f"line {number}", line


def _paragraphs(stream: BinaryIO, limit: int) -> _Samples:
    first, size, lines = 0, 0, list[bytes]()
    for number, line in numbered_lines(stream, limit):
        if line is not None and not line.strip():
            if size:
                yield f"line {first}", b"\n".join(lines) if size <= limit + 1 else None
            size, lines = 0, []
            continue
        first = first if size else number
        size += limit + 2 if line is None else len(line) + 1
        if size > limit + 1:  # too long: keep nothing of it, but look for its end
            lines = []
        elif line is not None:
            lines.append(line)
    if size:
        yield f"line {first}", b"\n".join(lines) if size <= limit + 1 else None


def _document(stream: BinaryIO, limit: int) -> _Samples:
    data = _read_up_to(stream, limit + 1)
    if len(data) > limit:
        yield "the whole file", None
    elif data.strip():
        yield "the whole file", data


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
    """At most `size` bytes, read in pieces: one call would allocate `size` bytes even for the smallest file."""
    pieces = []
    while size and (piece := stream.read(min(size, 1 << 18))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
