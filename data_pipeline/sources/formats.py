"""All file formats by name, also those of installed packages, and which format a file has by its first bytes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from data_pipeline.base.errors import DamagedInput, StoreError, UserError
from data_pipeline.base.formatting import first_few
from data_pipeline.base.packages import offered
from data_pipeline.sources import (
    csv,
    fasta,
    jsonl,
    pairs,
    plain_text,
    tables,
    warc,
    warc_records,
    wikiextractor,
    wikipedia,
)
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import Input, ReadStats, Record, wide_encoding

_HEAD = 1 << 18  # bytes of content to look at
_PRETTY = re.compile(rb'\s*\{[ \t]*\r?\n\s*"(?:[^"\\\n]|\\.)*"\s*:')  # JSON with indents
_FEWEST_ROWS = 3  # that show that a file is a table
_KEYS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Look:
    """A kind of file, and the `formats` that can read it, the best first. `certain`: no other format begins like
    this."""

    description: str
    formats: tuple[str, ...] = ()
    certain: bool = True

    def __str__(self) -> str:
        """ "a MediaWiki export (format: wikipedia)" """
        return self.description + (f" (format: {' or '.join(self.formats)})" if self.formats else "")


_SHIPPED: dict[str, type[Format]] = {
    "wet": warc_records.Wet,
    "warc": warc.Warc,
    "c4": jsonl.C4,
    "wikipedia": wikipedia.Wikipedia,
    "wikiextractor": wikiextractor.WikiExtractor,
    "jsonl": jsonl.JsonLines,
    "csv": csv.Csv,
    "text": plain_text.PlainText,
    "parquet": tables.Parquet,
    "arrow": tables.Arrow,
    "pairs": pairs.Pairs,
    "fasta": fasta.Fasta,
}
FORMATS: dict[str, type[Format]] = {**_SHIPPED, **offered("sources", Format, _SHIPPED)}
"""All formats by name: those that ship, and those of installed packages."""

_ARRAY = "one JSON array, not JSON Lines: make each of its objects one line by jq -c '.[]'"
_OTHERS = (
    (rb"\xfd7zXZ\0", Look("an xz archive: decompress it with xz -d")),
    (rb"PK\x03\x04|7z\xbc\xaf\x27\x1c|Rar!", Look("an archive of files: unpack it")),
    (rb"%PDF-", Look("a PDF: convert it to text")),
    (rb".{257}ustar", Look("a tar archive: unpack it with tar -xf")),
    # These may be read as text too: a corpus of code, for example.
    (rb"\s*(?i:<!doctype html|<html[\s>])[^\t\n]*\n", Look("an HTML page", ("text",))),
    (rb"\s*\[ *\r?\n\s*[\[{]", Look(_ARRAY, ("text",))),
    (rb"\s*\[\s*[\[{]", Look(_ARRAY, certain=False)),
)


def _looks() -> Iterator[tuple[bytes, Look]]:
    """(pattern of the first bytes, kind of file) of the formats, then of files that no format has."""
    formats: dict[Beginning, list[str]] = {}
    for name, known in FORMATS.items():
        if known.beginning:
            formats.setdefault(known.beginning, []).append(name)
    for beginning, names in formats.items():
        yield beginning.pattern, Look(beginning.description, (*names, *beginning.also))
    yield from _OTHERS


_LOOKS = [(re.compile(pattern, re.DOTALL), look) for pattern, look in _looks()]


def read(declared: str, file: Input, stats: ReadStats) -> Iterator[Record]:
    """The records of `file`, which has the format `declared`. Raises `DamagedInput` for a file of another format."""
    if FORMATS[declared].refuses_others:
        refuse_other_format(file, declared)
    yield from FORMATS[declared].read(file, stats)


def look_of(path: str) -> Look | None:
    """The kind of the file at `path`. None if the file can't be opened or decompressed, or is empty."""
    return _look(_head(path))


def advice(path: str, declared: str, reason: str) -> str:
    """The end of a message about a file that can't be read as `declared`: what the file looks like, or a question.

    "" if the `reason` says that already.
    """
    look = look_of(path)
    if look is None:
        return "; are its path and format right?"
    name = look.description if declared in look.formats else str(look)
    return "" if name in reason else f"; it looks like {name}"


def refuse_other_format(file: Input, declared: str) -> None:
    """Raises `DamagedInput` if the first bytes of the file belong to another format than `declared`.

    Without this check, any file could be read as plain text or tab-separated pairs, and a JSON array as JSON Lines.
    """
    if file.start:
        return
    if (look := _look(_head(file.path), certain=True)) and look.certain and declared not in look.formats:
        raise DamagedInput(file.path, "byte 0", f"declared as {declared}, but looks like {look}")


def _head(path: str) -> bytes:
    """The first bytes of the content of the file at `path`; b"" if they can't be read."""
    try:
        with open_stream(path, verified=False, read_ahead=_HEAD) as stream:
            return stream.read(_HEAD)
    except StoreError:
        raise
    except UserError:
        return b""


def _look(head: bytes, certain: bool = False) -> Look | None:
    """The kind of a file that begins with `head`. `certain`: only certain kinds are tried, which takes less time."""
    is_whole = len(head) < _HEAD
    head = head.removeprefix(b"\xef\xbb\xbf")
    for pattern, look in _LOOKS:
        if pattern.match(head):
            return look
    lines = [line for line in head.split(b"\n")[: None if is_whole else -1] if line.strip()][:100]
    objects = _objects(lines[:2])
    if len(objects) == 1 and is_whole and (other := jsonl.not_a_record(objects[0])):
        return Look(other, certain=False)
    if objects:
        readers = ("jsonl", "c4", "wikiextractor", "pairs")
        keys = first_few(objects[0], _KEYS_SHOWN)
        return Look(f"JSON Lines with the keys {keys}", readers, certain=len(objects) == 2)
    if _PRETTY.match(head):
        several = "JSON over several lines, not JSON Lines: make each object one line by jq -c ."
        found = next(map(jsonl.not_a_record, _objects([head])), "") or several
        return Look(f"{found}, or read it as it is", ("text",))
    if certain:
        return None
    if b"\0" in head:
        return Look(f"binary data or {wide_encoding(head).upper()}", certain=False)
    try:
        text = b"\n".join(lines).decode()
    except UnicodeDecodeError:
        return None
    if lines and all(line.count(b"\t") == 1 for line in lines):
        return Look("tab-separated pairs", ("pairs",), certain=False)
    _, (names, *rows) = csv.guess(text)
    if len(names) > 1 and len(rows) >= _FEWEST_ROWS - 1:
        return Look(f"CSV with the columns {first_few(names, _KEYS_SHOWN)}", ("csv", "text"), certain=False)
    return Look("plain text", ("text",), certain=False) if lines else None


def _objects(texts: list[bytes]) -> list[dict[str, object]]:
    """The JSON objects in `texts`; [] if one text isn't an object."""
    try:
        found = [json.loads(text) for text in texts]
    except (ValueError, RecursionError):
        return []
    return found if all(isinstance(one, dict) for one in found) else []
