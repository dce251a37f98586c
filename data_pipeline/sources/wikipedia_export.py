"""The parts of a MediaWiki export: its head, which describes the wiki, its pages, and ranges of pages to read apart.

Wikimedia compresses a dump's head, every hundred pages, and its end as separate bzip2 streams
(`…-pages-articles-multistream.xml.bz2`). Its index has a line `offset of the stream:page id:title` for each page. So a
dump with its index can be cut into ranges of whole pages.

Tags are found in the bytes without parsing. A page's text has "&lt;" for "<", so tags are reliable even in a damaged
page: after a page that no XML parser accepts, reading continues at the next tag.
"""

import contextlib
import io
import re
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from itertools import accumulate
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.stores import open_file
from data_pipeline.sources.decompress import BZIP2, Members, advancing, open_stream
from data_pipeline.sources.record import Input, Range
from data_pipeline.text.wikitext.namespaces import normalised_namespace

PAGE, END, ROOT = b"<page", b"</page>", b"<mediawiki"

_TAG = re.compile(rb"<(?:/page\s*>|(?:page|mediawiki)(?=[\s/>]))")
_LONGEST = 64  # the most bytes of a tag that a chunk may cut


class Tag(NamedTuple):
    """A tag: PAGE, END, ROOT, or b"" for more text without a tag. `before`: the bytes since the last tag."""

    before: bytes
    name: bytes
    position: int


def page_tags(chunks: Iterable[bytes]) -> Iterator[Tag]:
    """The tags in chunks of XML, with all bytes between them.

    [b"<mediawiki><pa", b"ge>a</page>"]  ->  Tag(b"", ROOT, 0), Tag(b">", PAGE, 11), Tag(b">a", END, 18)
    """
    base, rest = 0, b""
    for chunk in chunks:
        data = rest + chunk
        done = 0
        for tag in _TAG.finditer(data):
            name = END if tag[0].startswith(b"</") else tag[0]
            yield Tag(data[done : tag.start()], name, base + tag.start())
            done = tag.end()
        cut = data.rfind(b"<", done)
        if cut < 0 or len(data) - cut >= _LONGEST:
            cut = len(data)
        if cut > done:
            yield Tag(data[done:cut], b"", base + cut)
        base, rest = base + cut, data[cut:]
    yield Tag(rest, b"", base + len(rest))


# Every wiki has these namespaces. A dump without <siteinfo> names no others.
_CANONICAL_NAMESPACES = (
    "media special talk user user_talk project project_talk file file_talk image image_talk mediawiki mediawiki_talk "
    "template template_talk help help_talk category category_talk"
)

_HIDDEN_KEYS = ("-2", "6", "14")  # numbers of the namespaces Media, File and Category


class Site:
    """The wiki of an export: its address and namespaces, from the head of the export."""

    def __init__(self, head: bytes):
        """`head`: the bytes before the first page. Raises `ValueError` if they aren't the head of an export."""
        self.url_prefix = ""
        self.namespaces = {normalised_namespace(name) for name in _CANONICAL_NAMESPACES.split()}
        self.hidden_namespaces: set[str] = set()
        if b"<!DOCTYPE" in head:
            raise ValueError("the XML has a document type declaration")
        declared = _DECLARED.search(head)
        if b"\0" in head or (declared and declared[1].lower() not in (b"utf-8", b"ascii", b"us-ascii")):
            raise ValueError("the XML isn't in UTF-8, which MediaWiki writes; convert it with iconv")
        parser: XMLPullParser = XMLPullParser(["start", "end"])
        parser.feed(head)
        events = cast(Iterator[tuple[str, Element]], parser.read_events())
        try:
            _, root = next(events)
            if (name := _local_name(root)) != "mediawiki":
                raise ValueError(f"the XML is <{name}>")
            for event, element in events:
                if event == "end":
                    self._read(_local_name(element), element.get("key", ""), (element.text or "").strip())
        except ParseError as error:
            raise ValueError(f"not well-formed XML ({error})") from None
        except StopIteration:
            raise ValueError("no element in this XML") from None
        self.language = root.get(_LANGUAGE, "")

    def _read(self, name: str, key: str, value: str) -> None:
        if name == "base":
            self.url_prefix = _url_prefix(value)
        elif name == "namespace" and value:
            self.namespaces.add(normalised_namespace(value))
            if key in _HIDDEN_KEYS:
                self.hidden_namespaces.add(normalised_namespace(value))


_DECLARED = re.compile(rb"<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)[\"']")
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def _local_name(element: Element) -> str:
    """The name without its namespace, which differs between versions of the export schema."""
    return element.tag.rpartition("}")[2]


def _url_prefix(base: str) -> str:
    try:
        parts = urlsplit(base)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}/wiki/" if parts.netloc else ""


# The header of a bzip2 stream, then the header of its first block or, in an empty stream, the end marker.
_STREAM = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_MAGIC_BYTES = 10
_CHUNK = 1 << 18


def index_of(path: str) -> str:
    """The path of the index that Wikimedia publishes for a multistream dump.

    "a-multistream.xml.bz2"  ->  "a-multistream-index.txt.bz2"      "a-multistream1.xml-p1p9.bz2"  ->
    "a-multistream-index1.txt-p1p9.bz2"
    """
    return re.sub(r"multistream(\d*)\.xml([^/]*)$", r"multistream-index\1.txt\2", path)


def ranges(path: str, index_path: str, target_bytes: int) -> list[Range]:
    """The file in ranges of `target_bytes` or somewhat more, cut where bzip2 streams begin.

    A file that isn't bzip2 is one range. Raises `UserError` if the index belongs to another file, and `DamagedInput` if
    the index can't be read.

        ranges("a.bz2", "index.txt.bz2", 1 << 26)  ->  [Range(0, 67108901), Range(67108901, None, 1420)]
    """
    with open_file(path, read_ahead=_MAGIC_BYTES) as file:
        if not _begins_stream(file, 0):
            return [Range()]
    offsets, counts = _read_index(index_path)
    starts = [0]
    for offset in offsets:
        if offset - starts[-1] >= target_bytes:
            starts.append(offset)
    _check_index(path, index_path, offsets, counts, starts)
    before = list(accumulate(counts, initial=0))
    stops = [*starts[1:], None]
    return [Range(start, stop, before[bisect_left(offsets, start)]) for start, stop in zip(starts, stops, strict=True)]


def _begins_stream(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    return _STREAM.match(file.read(_MAGIC_BYTES)) is not None


def _read_index(index_path: str) -> tuple[list[int], list[int]]:
    """The offsets of the streams that hold pages, in order, and the number of pages in each."""
    offsets: list[int] = []
    counts: list[int] = []
    with open_stream(index_path) as lines:
        for number, line in enumerate(lines, 1):
            offset, _, rest = line.partition(b":")
            if not (offset.isdigit() and rest.partition(b":")[0].isdigit()):
                raise UserError(f"{index_path}: line {number}: expected offset:page id:title")
            if not offsets or int(offset) > offsets[-1]:
                offsets.append(int(offset))
                counts.append(0)
            elif int(offset) < offsets[-1]:
                raise UserError(f"{index_path}: line {number}: offset {int(offset)} comes after {offsets[-1]}")
            counts[-1] += 1
    if not offsets:
        raise UserError(f"{index_path}: is empty: expected offset:page id:title; remove it to read the dump whole")
    return offsets, counts


def _check_index(path: str, index_path: str, offsets: list[int], counts: list[int], starts: list[int]) -> None:
    """Raises UserError unless a stream begins at each cut, and the first stream has as many pages as in the index."""
    with open_file(path, read_ahead=_MAGIC_BYTES) as file:
        for offset in [*starts, offsets[0], offsets[-1]]:
            if not _begins_stream(file, offset):
                raise UserError(f"{index_path}: is no index of {path}: no bzip2 stream begins at its byte {offset}")
    pages = 0
    with contextlib.suppress(DamagedInput):  # reported when the pages are read
        for tag in page_tags(chunks(Input(path, offsets[0], offsets[1] if len(offsets) > 1 else None))):
            pages += tag.name == PAGE
    if pages != counts[0]:
        found = f"{pages} pages begin at its byte {offsets[0]}, not {counts[0]}"
        raise UserError(f"{index_path}: is no index of {path}: {found}")


def chunks(file: Input) -> Generator[bytes, None, None]:
    """The content of the file or, for a range, of the bzip2 streams that begin in the range.

    Raises `UserError` if the file can't be opened, `DamagedInput` at the first byte that can't be decompressed.
    """
    if file.start == 0 and file.stop is None:
        with open_stream(file.path, file.checksum) as stream:
            # read1 yields the content before the damage, then raises
            while data := cast(io.BufferedReader, stream).read1(_CHUNK):
                yield data
        return
    with open_file(file.path, file.checksum) as stored, contextlib.ExitStack() as scratch:
        stored.seek(file.start)
        streams = Members(stored, file.path, BZIP2, scratch, b"", file.start, advancing(file.checksum))
        while (file.stop is None or streams.position < file.stop) and streams.has_next():
            yield from streams.content()
