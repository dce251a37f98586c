"""Records of WARC archives (.warc, .wet): ISO 28500, versions 0.17 to 1.1, plain or compressed.

Common Crawl's WET archives (`CC-MAIN-….warc.wet.gz`) have the text of each crawled page as a `conversion` record.
"""

import base64
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import Input, ReadStats, Record, RecordOptions, too_long

_VERSION = re.compile(rb"WARC/\d+\.\d+[ \t]*\r?\n")
_NEXT_RECORD = re.compile(rb"\r?\n\r?\n(WARC/\d+\.\d+[ \t]*\r?\n)")
_LONGEST_LINE = 1 << 16
ARCHIVE = Beginning(rb"WARC/\d\.\d+[ \t]*\r?\n[\w-]+:", "a WARC archive")
_FORMATS = {"conversion": "wet", "response": "warc"}
_TYPES = {"warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation"}


class WarcOptions(RecordOptions):
    """Options of every archive of records."""

    verify_digests: bool = True
    """Check each WARC-Block-Digest. Nothing else detects a changed byte in an uncompressed file."""


@dataclass(slots=True)
class WarcRecord:
    """Record `ordinal` of an archive, with its content `block`. `position` is for messages. Names of `headers` are in
    lower case."""

    ordinal: int
    position: str
    headers: dict[str, str]
    block: bytes

    @property
    def url(self) -> str:
        return self.headers.get("warc-target-uri", "").strip("<>")  # some writers of WARC 1.0 add the brackets

    def page(self, text: str, stats: ReadStats, title: str = "", language: str = "") -> Record | None:
        """The page with this `text`. None if its address, text or date is missing: the page is counted as dropped."""
        timestamp = self.headers.get("warc-date", "")
        if self.url and text.strip() and timestamp:
            return Record(self.ordinal, text, self.url, title, timestamp, language)
        missing = "no_url" if not self.url else "no_timestamp" if text.strip() else "no_content"
        stats.counters.document(missing, f"{self.url} {text[:200]}")
        return None


class _Malformed(ValueError):
    """A record that can't be used. The reader then looks for the next one."""


class _TooLong(_Malformed):
    """A record longer than the limit. It is damage only if it is of the type to read."""


def warc_records(file: Input, stats: ReadStats, record_type: str, options: WarcOptions) -> Iterator[WarcRecord]:
    """Every record of one type, each as long as its Content-Length says. Counts them under `read`.

    A record with a damaged header, length or digest is noted as damage. It counts under `read` too, whatever its type,
    which may be the damaged part. Reading continues at the next line that begins a record.

    Raises `DamagedInput` for a file that isn't an archive and for an archive of other types only (a WARC read as WET);
    an archive of `warcinfo` records alone is empty. Raises it after all whole records if the archive is cut off or its
    compression is corrupt. A cut exactly between two records leaves a valid archive and can't be detected.

    We don't use a WARC library: fastwarc and warcio both read a truncated archive as a shorter one.
    """
    with open_stream(file.path, file.checksum) as stream:
        source = _Source(stream)
        ordinal, end_unknown = 0, False  # end_unknown: what follows may still belong to the last record
        types: set[str] = set()
        while source.skip_to_record():
            position = f"record {ordinal} at byte {source.offset} of the content"
            if source.skipped and not end_unknown:
                _note(stats, f"{source.skipped} bytes before {position}", "expected a line such as WARC/1.0")
            end_unknown = False
            try:
                headers = _headers(source)
                types.add(headers["warc-type"])
                matches = headers["warc-type"] == record_type
                block = _block(source, headers, options)
            except _TooLong as problem:
                end_unknown = True
                if matches:
                    _note(stats, position, str(problem))
            except _Malformed as problem:
                end_unknown = True
                _note(stats, position, str(problem))
            except EOFError as end:
                raise DamagedInput(file.path, position, str(end)) from None
            else:
                if matches:
                    stats.counters.read += 1
                    if options.verify_digests and not _digest_holds(headers.get("warc-block-digest", ""), block):
                        stats.damaged(position, "its content differs from its WARC-Block-Digest")
                    else:
                        yield WarcRecord(ordinal, position, headers, block)
                if source.cut:
                    reason = "the archive ends before the empty lines that close a record"
                    raise DamagedInput(file.path, position, reason)
            ordinal += 1
        if ordinal == 0:
            raise DamagedInput(file.path, "byte 0", "not a WARC archive: expected a line such as WARC/1.0")
        if source.skipped and not end_unknown:
            raise DamagedInput(file.path, f"the last {source.skipped} bytes", "expected a line such as WARC/1.0")
        if record_type not in types and (others := types - {"warcinfo"}):
            way_out = "".join(f"; its format is {_FORMATS[kind]}" for kind in others & _FORMATS.keys())
            reason = f"expected {record_type} records, found only {', '.join(sorted(others))}{way_out}"
            raise DamagedInput(file.path, "its end", reason)


def _note(stats: ReadStats, position: str, reason: str) -> None:
    stats.counters.read += 1
    stats.damaged(position, reason)


class _Source:
    """A stream that knows its offset and takes back bytes that were read too far."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._back = stream, io.BytesIO()
        self.offset = 0
        self.skipped = 0  # bytes between the last record and the one found
        self.cut = False  # the file ends before the empty lines that close the last record

    def read(self, size: int) -> bytes:
        data = self._back.read(size)
        data += self._stream.read(size - len(data)) if len(data) < size else b""
        self.offset += len(data)
        return data

    def readline(self) -> bytes:
        line = self._back.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            line += self._stream.readline(_LONGEST_LINE - len(line))
        self.offset += len(line)
        return line

    def unread(self, data: bytes) -> None:
        self._back = io.BytesIO(data + self._back.read())
        self.offset -= len(data)

    def skip_to_record(self) -> bool:
        """Goes to the next line that begins a record; empty lines on the way don't count as skipped."""
        self.skipped = 0
        while line := self.readline():
            if _VERSION.fullmatch(line):
                self.unread(line)
                return True
            self.skipped += len(line) if line.strip() else 0
        return False


def _headers(source: _Source) -> dict[str, str]:
    """The header fields by name, the first of each name. A line that begins with a space continues the one before."""
    headers: dict[str, str] = {}
    name = ""
    source.readline()  # the version
    while (line := source.readline()).strip():
        field, colon, value = line.decode(errors="replace").partition(":")
        if field.startswith((" ", "\t")) and name:
            headers[name] += " " + line.decode(errors="replace").strip()
            continue
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            raise EOFError("the archive ends inside this record's header")
        if not field.strip() or not colon or not line.endswith(b"\n"):
            source.unread(line)  # it may begin the next record
            raise _Malformed(f"expected a header field, found {line[:40]!r}")
        name = field.strip().lower()
        headers.setdefault(name, value.strip())
    if not line.endswith(b"\n"):
        raise EOFError("the archive ends inside this record's header")
    headers["warc-type"] = headers.get("warc-type", "").lower()
    if headers["warc-type"] not in _TYPES:  # a changed byte in the type would otherwise skip the record silently
        raise _Malformed(f"WARC-Type is {headers['warc-type'][:40]!r}")
    return headers


def _block(source: _Source, headers: dict[str, str], options: WarcOptions) -> bytes:
    """The record's content. Raises _Malformed if its Content-Length doesn't lead to the two empty lines after it."""
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 20):
        raise _Malformed(f"Content-Length is {length[:40]!r}")
    if int(length) > options.max_record_bytes:
        raise _TooLong(too_long(options))
    block = source.read(int(length))
    closing = [source.readline(), source.readline()]
    if len(block) == int(length) and not b"".join(closing).strip():
        source.cut = not closing[1].endswith(b"\n")
        return block
    # The length is wrong or the file is cut. The bytes may contain other records: reading resumes at the first one.
    data = block + b"".join(closing)
    if following := _NEXT_RECORD.search(data):
        source.unread(data[following.start(1) :])
    elif len(block) < int(length):
        raise EOFError("the archive ends inside this record")
    raise _Malformed(f"its Content-Length, {length}, doesn't lead to the end of a record")


def _digest_holds(label: str, block: bytes) -> bool:
    """Whether `block` has the digest "sha1:<base 32 or hex>". True for an unknown algorithm or form."""
    algorithm, _, value = label.partition(":")
    algorithm = algorithm.lower().replace("-", "")
    if algorithm not in ("md5", "sha1", "sha256", "sha512"):
        return True
    digest = hashlib.new(algorithm, block, usedforsecurity=False)
    if len(value) == 2 * digest.digest_size:
        return value.lower() == digest.hexdigest()
    known = base64.b32encode(digest.digest()).decode()
    return len(value) != len(known) or value.upper() == known


def read_wet(file: Input, stats: ReadStats) -> Iterator[Record]:
    """Every page that has an address, text and a date; the ordinal is the index among all records of the archive.

    Counts `read` (pages), `undecodable` (pages with bytes that aren't UTF-8, which become U+FFFD), and each dropped
    page under the first rule that applies: `no_url`, `no_content`, `no_timestamp`. For damage see `warc_records`. The
    language is the first (predominant) code of WARC-Identified-Content-Language, in ISO 639-3; crawls have it since
    2018.

    TFDS's C4 splits these files by lines, not by Content-Length. So TFDS loses lines of text that begin with "WARC",
    "Content-" or "CONTENT-", ends a page at a line "WARC/1.0", and ends the file at an undecodable byte. This reader
    keeps that text, so its counts differ by those pages and lines.

        WARC-Target-URI: http://a.org/  WARC-Date: 2019-07-17T12:15:59Z  Content-Length: 12  …  Content-rich
          ->  Record(1, "Content-rich", "http://a.org/", timestamp="2019-07-17T12:15:59Z")
    """
    options = WarcOptions(**file.options)
    for record in warc_records(file, stats, "conversion", options):
        language = record.headers.get("warc-identified-content-language", "").partition(",")[0].strip()
        if page := record.page(_decoded(record.block, stats), stats, language=language):
            yield page


def _decoded(block: bytes, stats: ReadStats) -> str:
    r"""b"na\xefve"  ->  "na\ufffdve" """
    try:
        return block.decode()
    except UnicodeDecodeError:
        stats.counters.undecodable += 1
        return block.decode(errors="replace")


class Wet(Format):
    """Common Crawl's texts of pages."""

    options, refuses_others, beginning = WarcOptions, True, ARCHIVE
    read = staticmethod(read_wet)
