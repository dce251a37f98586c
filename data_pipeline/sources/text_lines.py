"""Lines of text formats, read in bounded memory however long they are."""

from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.foundation.config_file import Section
from data_pipeline.sources.record import Intake

_CHUNK = 1 << 18


class RecordOptions(Section):
    """Options of every text format."""

    max_record_bytes: int = 64 << 20
    """Longer records, in bytes, are noted as damage and skipped."""


def numbered_lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    r"""Every line with its number, from 1, and without its end (LF or CR LF); None for a line over `limit` bytes.

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


def too_long(options: RecordOptions) -> str:
    return f"longer than max_record_bytes, {options.max_record_bytes}"


def decode(data: bytes, intake: Intake) -> str:
    r"""Decodes UTF-8. Invalid byte sequences become U+FFFD, and the record is counted as `undecodable`.

    b"na\xefve"  ->  "na\ufffdve"
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        intake.counters["undecodable"] += 1
        return data.decode(errors="replace")
