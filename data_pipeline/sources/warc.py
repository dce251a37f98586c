"""Common Crawl WARC archives (`CC-MAIN-….warc.gz`): the main text of the HTML pages in their HTTP responses."""

import contextlib
import re
import zlib
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from email.policy import compat32
from typing import Any

import brotli
import zstandard
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from data_pipeline.sources.charsets import page_text
from data_pipeline.sources.format import Format
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.sources.warc_records import ARCHIVE, WarcOptions, warc_records

_STATUS = re.compile(rb"HTTP/[\d.]+[ \t]+(\d{3})\b")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_ZSTANDARD_WINDOW = 1 << 23  # bytes, the maximum for a Content-Encoding: RFC 9659
_SLICE = 1 << 12  # bytes of input at a time: zstandard can't limit its output, here at most 128 MiB
_HTML = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\s\0]*<")
_TYPES = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_TYPE = re.compile(r"\s*([\w!#$&^.+-]+/[\w!#$&^.+-]+)\s*(?:;|\Z)", re.ASCII)
_CHARSET = re.compile(r""";\s*charset\s*=\s*(?:"([^"]*)|([^\s;"]*))""", re.IGNORECASE)


class Options(WarcOptions):
    """The `options` of a WARC source."""

    main_content: bool = True
    """Leave out navigation, headers and footers. false: take all visible text, as WET files have it."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """The text of every HTML page fetched with status 200; the ordinal is the index among all records of the archive.

    Bytes are decoded as browsers do (`page_text`); undecodable bytes become U+FFFD. A body without a Content-Type is
    HTML if it begins as HTML. Counts `read` (responses), `undecodable`, and each dropped page under the first rule that
    applies: `not_200`, `not_html`, `no_url`, `no_content` (no text in the page), `no_timestamp`. A response whose
    encoding (chunked, gzip, deflate, br, zstd) can't be decoded is damage; for other damage see `warc_records`.

        HTTP/1.1 200 OK  Content-Type: text/html  …  <title>A</title><p>Some text.</p>
          ->  Record(2, "Some text.", "http://a.org/", "A", "2019-07-17T12:15:59Z")
    """
    options = Options(**file.options)
    for record in warc_records(file, stats, "response", options):
        status, http, body = _parse_http(record.block)
        if status != 200:
            stats.counters.document("not_200", f"{status} {record.url}")
            continue
        kind, label = _content_type(http)
        is_html = kind in ("text/html", "application/xhtml+xml")
        if not (is_html or (not kind and _begins_as_html(body, http, options.max_record_bytes))):
            stats.counters.document("not_html", f"{kind or 'no Content-Type'} {record.url}")
            continue
        try:
            html, whole = page_text(_decoded(body, http, options.max_record_bytes), label)
            if not whole:
                stats.counters.undecodable += 1
            tree = HTMLTree.parse(html)
            text = extract_plain_text(tree, main_content=options.main_content, alt_texts=False)
        except (ValueError, RuntimeError) as error:
            stats.damaged(record.position, f"{record.url}: {error}")
            continue
        if page := record.page(text, stats, " ".join((tree.title or "").split())):
            yield page


def _parse_http(block: bytes) -> tuple[int, Message, bytes]:
    """(status, headers, body) of a response; status 0 if it isn't HTTP (a DNS lookup, for example)."""
    head_end = _HEAD_END.search(block)
    head, body = (block[: head_end.start()], block[head_end.end() :]) if head_end else (block, b"")
    status_line, _, fields = head.partition(b"\n")
    status = _STATUS.match(status_line)
    headers = BytesHeaderParser(policy=compat32).parsebytes(fields)
    return int(status[1]) if status else 0, headers, body


def _content_type(headers: Message) -> tuple[str, str]:
    """(media type, label of the character set); "" for a missing one.

    Of several types the last counts. It keeps the label of an earlier, equal type: https://fetch.spec.whatwg.org.

    "text/html, text/html; charset=sjis"  ->  ("text/html", "sjis")
    """
    kind = label = ""
    for value in _TYPES.findall(",".join(map(str, headers.get_all("content-type", [])))):
        if not (found := _TYPE.match(value)) or found[1] == "*/*":
            continue
        if found[1].lower() != kind:
            kind, label = found[1].lower(), ""
        if charset := _CHARSET.search(value):
            label = charset[1] or charset[2] or ""
    return kind, label


def _begins_as_html(body: bytes, headers: Message, limit: int) -> bool:
    with contextlib.suppress(ValueError):
        return _HTML.match(_decoded(body, headers, limit)) is not None
    return False


def _decoded(body: bytes, headers: Message, limit: int) -> bytes:
    """The body without its transfer and content encodings.

    Crawlers often store a decoded body with the original headers. So a body that doesn't begin like its encoding is
    returned unchanged.
    """
    if _says(headers, "transfer-encoding", "chunked") and _CHUNK_SIZE.match(body):
        body = _unchunked(body)
    if body.startswith(b"\x1f\x8b"):
        return _decompressed(body, zlib.decompressobj(16 + zlib.MAX_WBITS), limit, "gzip")
    if body.startswith(zstandard.FRAME_HEADER):
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTANDARD_WINDOW).decompressobj()
        return _decompressed(body, frame, limit, "zstd")
    if body.lstrip()[:1] == b"<":
        return body
    if _says(headers, "content-encoding", "deflate"):
        inflate = zlib.decompressobj(zlib.MAX_WBITS if body[:1] == b"\x78" else -zlib.MAX_WBITS)
        return _decompressed(body, inflate, limit, "deflate")
    if _says(headers, "content-encoding", "br"):
        return _unbrotlied(body, limit)
    return body


def _says(headers: Message, name: str, encoding: str) -> bool:
    return encoding in str(headers.get(name, "")).lower().replace(" ", "").split(",")


def _unchunked(body: bytes) -> bytes:
    """b"3\\r\\nabc\\r\\n0\\r\\n\\r\\n"  ->  b"abc"; raises ValueError where a chunk is cut or malformed."""
    chunks, position = list[bytes](), 0
    while size := _CHUNK_SIZE.match(body, position):
        start, length = size.end(), int(size[1], 16)
        if not length:
            return b"".join(chunks)
        chunks.append(body[start : start + length])
        position = start + length
        position += 2 if body[position : position + 2] == b"\r\n" else 1
    raise ValueError(f"corrupt chunked encoding at byte {position}")


def _decompressed(body: bytes, decompressor: Any, limit: int, encoding: str) -> bytes:
    """The content of `body`, decompressed in slices until there are `limit` bytes."""
    chunks, size = list[bytes](), 0
    try:
        for start in range(0, len(body), _SLICE):
            if decompressor.eof or size > limit:
                break
            chunks.append(decompressor.decompress(body[start : start + _SLICE]))
            size += len(chunks[-1])
    except (zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"corrupt {encoding} encoding ({error})") from None
    if not decompressor.eof or size > limit:
        raise ValueError(f"{encoding} encoding is cut off, or holds more than max_record_bytes")
    return b"".join(chunks)


def _unbrotlied(body: bytes, limit: int) -> bytes:
    decompressor = brotli.Decompressor()
    try:
        content: bytes = decompressor.process(body, output_buffer_limit=limit)
    except brotli.error as error:
        raise ValueError(f"corrupt br encoding ({error})") from None
    if not decompressor.is_finished():
        raise ValueError("br encoding is cut off, or holds more than max_record_bytes")
    return content


class Warc(Format):
    """Common Crawl's pages as they were fetched."""

    options, refuses_others, beginning = Options, True, ARCHIVE
    read = staticmethod(read)
