"""Wikipedia dumps (`pages-articles.xml.bz2`, Special:Export): MediaWiki XML, export schemas 0.3 to 0.11."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote
from xml.etree.ElementTree import Element, ParseError, fromstring
from xml.parsers import expat

from data_pipeline.base import stores
from data_pipeline.base.errors import DamagedInput
from data_pipeline.base.formatting import masked
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import Input, Range, ReadStats, Record
from data_pipeline.sources.wikipedia_export import END, PAGE, ROOT, Site, Tag, chunks, index_of, page_tags, ranges
from data_pipeline.text.wikitext.markup import plain_text
from data_pipeline.text.wikitext.namespaces import is_redirect, normalised_namespace

_MAX_PAGE = 1 << 26  # bytes; MediaWiki's own limit of a text is 2 MiB
_MAX_BETWEEN = 1 << 24  # bytes between two pages, or before the first


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """The wikitext of every article: namespace 0, no redirect, model wikitext, the page's last revision.

    The ordinal is the page's index among all pages of the file. From a range (`wikipedia_export.ranges`), the pages of
    its streams are read. One page is in memory at a time.

    Counts `read` (all pages) and the dropped pages: `not_article`, `redirect`, `empty` and `damaged`. A page that isn't
    well-formed XML is damage, and reading continues with the next page. A file that ends before `</mediawiki>` yields
    its whole pages, is noted as damaged, and counts `truncated_xml`; if it ends inside a page, that page counts as
    `damaged`. Raises `DamagedInput` for a file that isn't a MediaWiki export or can't be decompressed.

        <page><title>A b</title><ns>0</ns>…<text>'''A'''</text>…  ->  Record(0, "'''A'''", "https://…/wiki/A_b", "A b")
    """
    reader = _Reader(file, stats)
    if file.start:
        reader.find_head()
    with closing(chunks(file)) as content:
        for tag in page_tags(content):
            if record := reader.take(tag):
                yield record
    reader.end()


@dataclass(frozen=True)
class _Page:
    """A `<page>` with its last revision. `namespace`: None in schemas before 0.6."""

    title: str
    namespace: str | None
    is_redirect: bool
    text: str
    model: str
    timestamp: str


def _parse_page(data: bytes | bytearray) -> _Page:
    """The page of a `<page>` element. Raises ValueError if the page can't be used."""
    if len(data) > _MAX_PAGE:
        raise ValueError(f"a page of more than {_MAX_PAGE} bytes")
    try:
        page = fromstring(data)
    except ParseError as error:
        raise ValueError(f"not well-formed XML ({expat.ErrorString(error.code)})") from None
    if not (title := page.findtext("title", "")).strip():
        raise ValueError("a page without a title")
    revision = next(reversed(page.findall("revision")), Element("revision"))
    slots = [slot for slot in revision.findall("content") if slot.findtext("role") == "main"]

    def value(name: str, default: str = "") -> str:  # the text of another slot isn't the page's
        found = (one.findtext(name) for one in (*reversed(slots), revision))
        return next((text for text in found if text is not None), default)

    namespace, is_redirect = page.findtext("ns"), page.find("redirect") is not None
    return _Page(title, namespace, is_redirect, value("text"), value("model", "wikitext"), value("timestamp"))


class _Reader:
    """The state of reading an export: outside or inside `<mediawiki>`, in a page or between two."""

    def __init__(self, file: Input, stats: ReadStats):
        self._file, self._stats = file, stats
        self._site: Site | None = None
        self._open = False  # inside <mediawiki>
        self._page: bytearray | None = None  # the page that is being read
        self._ordinal = file.first_ordinal
        self._position = 0  # of the page, or the end of the last one
        self._between = bytearray()

    def find_head(self) -> None:
        """Reads the head of the file, with namespaces and address, for a range that begins elsewhere."""
        head = bytearray()
        with closing(chunks(Input(self._file.path))) as content:
            for before, name, _ in page_tags(content):
                head += before
                if name == PAGE or len(head) > _MAX_BETWEEN:
                    break
                head += name
        self._between = head
        self._end_between()

    def take(self, tag: Tag) -> Record | None:
        """Takes a tag and the bytes before it. Returns the record that the tag ends."""
        before, name, position = tag
        record = None
        if self._page is None:
            self._add_between(before + (name if name != PAGE else b""))
        else:
            if len(self._page) <= _MAX_PAGE:
                self._page += before
            if name == END:
                self._page += name
                record = self._end_page()
            elif name:
                self._abandon_page("the next page begins before this one ends")
            if name == ROOT:
                self._open = False
                self._add_between(name)
        if name == PAGE:
            self._end_between()
            self._position, self._page = position, bytearray(PAGE)
        return record

    def end(self) -> None:
        """Notes what is missing at the end of the file or range. Only the last range has the end of the XML."""
        if self._page is not None:
            self._abandon_page("the XML ends inside this page")
        else:
            self._between = bytearray(_HALF_A_TAG.sub(b"", self._between))
            self._end_between()
            if not self._open or self._file.stop is not None:
                return
            self._stats.damaged_between(f"page {self._ordinal}", "the XML ends before </mediawiki>")
        self._stats.counters.truncated_xml += 1

    def _add_between(self, data: bytes) -> None:
        self._between += data
        if len(self._between) > _MAX_BETWEEN:
            if self._site is None:
                raise self._no_export(f"no page in the first {_MAX_BETWEEN} bytes")
            self._end_between()

    def _end_between(self) -> None:
        """Interprets the bytes between two pages: white space, or the end of an export and the head of the next."""
        data, self._between = bytes(self._between), bytearray()
        if self._site is not None and not data.strip():
            return
        for index, part in enumerate(_END_OF_ROOT.split(data)):
            if index:
                self._open = False
            if self._site is None or _ROOT_TAG.search(part):
                part = self._begin_export(part)
            if _COMMENT.sub(b"", part).strip():
                reason = "bytes between two pages that are no part of a MediaWiki export"
                self._stats.damaged_between(self._where(), reason)

    def _begin_export(self, data: bytes) -> bytes:
        """Parses the head of an export at the start of `data`. Returns the bytes behind the head."""
        root = _ROOT_TAG.search(data)
        end = _END_OF_SITEINFO.search(data) or (None if b"<siteinfo" in data else root)
        head, rest = (data[: end.end()], data[end.end() :]) if end else (data, b"")
        try:
            self._site = Site(head.strip())
        except ValueError as error:
            if self._site is None:
                raise self._no_export(str(error)) from None
            self._stats.damaged_between(self._where(), str(error))
        self._open = not (root and root[0].endswith(b"/>"))
        return rest

    def _end_page(self) -> Record | None:
        assert self._page is not None
        assert self._site is not None
        try:
            page = _parse_page(self._page)
        except ValueError as problem:
            self._abandon_page(str(problem))
            return None
        counters, site = self._stats.counters, self._site
        ordinal, self._ordinal, self._page = self._ordinal, self._ordinal + 1, None
        counters.read += 1
        if not self._is_article(page):
            counters.document("not_article", page.title)
        elif page.is_redirect or is_redirect(page.text):
            counters.document("redirect", f"{page.title}: {page.text}")
        elif not page.text.strip():
            counters.document("empty", page.title)
        else:
            url = site.url_prefix and site.url_prefix + url_title(page.title)
            hidden = frozenset(site.hidden_namespaces)
            timestamp = page.timestamp.strip()
            return Record(ordinal, page.text, url, page.title, timestamp, site.language, hidden_namespaces=hidden)
        return None

    def _abandon_page(self, reason: str) -> None:
        self._stats.counters.read += 1
        self._stats.damaged(self._where(), reason)
        self._ordinal += 1
        self._page = None

    def _is_article(self, page: _Page) -> bool:
        assert self._site is not None
        if page.namespace is None:
            prefix, colon, _ = page.title.partition(":")
            in_main = not (colon and normalised_namespace(prefix) in self._site.namespaces)
        else:
            in_main = page.namespace.strip() == "0"
        return in_main and page.model == "wikitext"

    def _where(self) -> str:
        after = f" after byte {self._file.start} of the file" if self._file.start else ""
        return f"page {self._ordinal}, byte {self._position} of the XML{after}"

    def _no_export(self, reason: str) -> DamagedInput:
        return DamagedInput(self._file.path, "byte 0 of the XML", f"expected a MediaWiki export: {reason}")


_END_OF_ROOT = re.compile(rb"</mediawiki\s*>")
_ROOT_TAG = re.compile(rb"<mediawiki(?:\s[^<>]*)?>|<mediawiki/>")
_END_OF_SITEINFO = re.compile(rb"</siteinfo\s*>|<siteinfo\s*/>")
_HALF_A_TAG = re.compile(rb"<[^<>]*\Z")
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)


def url_title(title: str) -> str:
    """A title as Wikipedia writes it in addresses.

    "Who's (on) A/B?"  ->  "Who%27s_(on)_A/B%3F"
    """
    return quote(title.replace(" ", "_"), safe=";@$!*(),/:~")


class Wikipedia(Format):
    """Dumps of wikis: wikitext, which becomes plain text."""

    refuses_others, divisible = True, True
    beginning = Beginning(rb"\s*(?:<\?xml[^>]*>\s*)?(?><!--.*?-->\s*)*<mediawiki[\s>]", "a MediaWiki export")
    read = staticmethod(read)

    @staticmethod
    def ranges(file: Input, target_bytes: int) -> list[Range]:
        """The ranges of a multistream dump that has its index beside it."""
        index = index_of(file.path)
        if index == file.path:
            return [Range()]
        if not stores.exists(index):
            line = f"{file.path}: one worker reads all of it; put its index, {index}, beside it"
            print(masked(line), file=sys.stderr)
            return [Range()]
        try:
            return ranges(file.path, index, target_bytes)
        except DamagedInput:
            return [Range()]  # reading the whole file reports where the damage is

    @staticmethod
    def text_of(record: Record, holes: Counter[str] | None = None) -> str:
        return plain_text(record.text, record.title, record.hidden_namespaces, record.timestamp, holes)
