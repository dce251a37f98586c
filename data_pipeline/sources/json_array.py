"""JSON files: one array of objects, as `Dataset.to_json(lines=False)` and pandas write it, or JSON Lines."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources import jsonl
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.sources.text_lines import next_byte, open_text

_CHUNK = 1 << 18
_OUTSIDE = re.compile(rb'["\[\]{},]')  # what matters outside of a string, and inside
_INSIDE = re.compile(rb'\\(?s:.)?|"')


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """A record for every object with a text; the ordinal is its index in the array, or the line's.

    An array is read an element at a time. Counts and damage are as in `jsonl.read`. Raises `DamagedInput` for an array
    without its end, after the elements before, and for text after its end.

        [{"text":"Hello.","url":"https://a.org/"}]  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = jsonl.Options(**file.options)
    with open_text(file, options) as stream:
        unit, found = objects(stream, file.path, stats, options)
        yield from jsonl.records(found, unit, options, stats)


def objects(
    stream: BinaryIO, path: str, stats: ReadStats, options: jsonl.Options
) -> tuple[str, Iterator[tuple[int, dict[str, object]]]]:
    """What messages call an object of the file, "element" or "line", and every object with its number, from 1."""
    first = 1
    while (begins := next_byte(stream)) and begins in b"\xef\xbb\xbf \t\r\n":
        first += stream.read(1) == b"\n"
    if begins != b"[":
        return "line", jsonl.json_lines(stream, stats, options, first)
    elements = enumerate(_elements(path, stream, options.max_record_bytes), 1)
    return "element", jsonl.parsed(elements, "element", stats, options)


def _elements(path: str, stream: BinaryIO, limit: int) -> Iterator[bytes | None]:
    """The bytes of each element of an array; None for one over `limit` bytes. Only strings and brackets are understood.

    b'[{"a": "]"}, 3]'  ->  b'{"a": "]"}', b" 3"
    """
    depth, quoted, escaped, number = 0, False, False, 1
    element = bytearray()
    while chunk := stream.read(_CHUNK):
        begin, position = 0, int(escaped)
        escaped = False
        while token := (_INSIDE if quoted else _OUTSIDE).search(chunk, position):
            position, mark = token.end(), token[0]
            if mark == b'"':
                quoted = not quoted
            elif quoted:
                escaped = mark == b"\\"  # by itself: what it escapes is in the next chunk
            elif mark in b"[{":
                depth += 1
                if depth == 1:
                    begin = position
            elif depth == 1:  # a comma, or the end
                element += chunk[begin : token.start()]
                if mark == b"," or element.strip():
                    yield bytes(element) if len(element) <= limit else None
                    number += 1
                element, begin = bytearray(), position
                if mark != b",":
                    rest = chunk[position:]
                    while not rest.strip() and (rest := stream.read(_CHUNK)):
                        pass
                    if rest.strip():
                        raise DamagedInput(path, f"element {number}", "there is more after the end of the array")
                    return
            elif mark != b",":
                depth -= 1
        if len(element) <= limit:
            element += chunk[begin:]
    raise DamagedInput(path, f"element {number}", "the file ends before the end of its array")
