"""Wikipedia dumps (`pages-articles.xml.bz2`, Special:Export): MediaWiki XML, export schemas 0.3 to 0.11."""

from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote, urlsplit
from xml.parsers import expat

from data_pipeline.errors import DamagedInput
from data_pipeline.sources.record import Record

_CHUNK = 1 << 18

# What is read, by depth and name: the depth sets a revision's own <text> apart from that of its other slots.
_VALUES = {
    (3, "base"),
    (4, "namespace"),
    (3, "title"),
    (3, "ns"),
    (4, "model"),
    (4, "text"),
}

# Valid in every wiki; a dump without <siteinfo> has nothing else to go by.
_CANONICAL_NAMESPACES = (
    "media special talk user user_talk project project_talk file file_talk image image_talk mediawiki mediawiki_talk "
    "template template_talk help help_talk category category_talk"
)

_CUT_OFF = {
    expat.errors.codes[error]
    for error in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
}


def read(stream: BinaryIO, path: str, counters: Counter) -> Iterator[Record]:
    """The wikitext of every article: namespace 0, no redirect, model wikitext, the page's last revision.

    The ordinal is the page's index among all pages of the file. Counts `read` (all pages) and what was dropped:
    `not_article`, `redirect`, `empty`. A file whose XML stops in the middle yields its whole pages and then sets
    `truncated_xml` to 1. Raises `DamagedInput` for anything that isn't a MediaWiki export. One page is in memory at a
    time, along with those that end in the same 256 KiB of XML.

        <page><title>A b</title><ns>0</ns>…<text>'''A'''</text>…  ->  Record(0, "'''A'''", "https://…/wiki/A_b", "A b")
    """
    export = _Export(path, counters)
    while chunk := stream.read(_CHUNK):
        export.feed(chunk)
        yield from export.take()
    export.finish()
    yield from export.take()


class _Export:
    """Expat's callbacks: collects the pages that are articles."""

    def __init__(self, path: str, counters: Counter):
        self._path, self._counters = path, counters
        self._articles: list[Record] = []
        self._namespaces = {_normalised(name) for name in _CANONICAL_NAMESPACES.split()}
        self._url_prefix = ""
        self._depth = 0
        self._has_root = False
        self._pages = 0
        self._page: dict[str, str] = {}
        self._value: list[str] | None = None  # pieces of the element being read, if it is one of _VALUES

        # Expat leaves external entities alone unless it is given a handler; a doctype is refused altogether.
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.buffer_size = 1 << 16
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._doctype
        self._parser = parser

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.Parse(chunk, False)
        except expat.ExpatError as error:
            raise self._damage(f"not well-formed XML ({error})") from None

    def finish(self) -> None:
        try:
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            if not self._has_root:
                raise self._damage("expected a MediaWiki export, found no element at all") from None
            if error.code not in _CUT_OFF:
                raise self._damage(f"not well-formed XML ({error})") from None
            self._counters["truncated_xml"] = 1

    def take(self) -> list[Record]:
        articles, self._articles = self._articles, []
        return articles

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1:
            if name != "mediawiki":
                raise self._damage(f"expected a MediaWiki export, found <{name}>")
            self._has_root = True
        elif name == "page" and self._depth == 2:
            self._page = {}
        elif name == "redirect" and self._depth == 3:
            self._page["redirect"] = attributes.get("title", "")
        elif name == "revision" and self._depth == 3:
            self._page.pop("text", None)
            self._page.pop("model", None)
        elif (self._depth, name) in _VALUES:
            self._value = []

    def _characters(self, data: str) -> None:
        if self._value is not None:
            self._value.append(data)

    def _end(self, name: str) -> None:
        if self._value is not None:
            self._keep(name, "".join(self._value))
            self._value = None
        elif name == "page" and self._depth == 2:
            self._finish_page()
        self._depth -= 1

    def _keep(self, name: str, value: str) -> None:
        if name == "base":
            base = urlsplit(value)
            self._url_prefix = f"{base.scheme}://{base.netloc}/wiki/" if base.netloc else ""
        elif name == "namespace":
            if value:
                self._namespaces.add(_normalised(value))
        else:
            self._page[name] = value

    def _finish_page(self) -> None:
        page, ordinal = self._page, self._pages
        self._pages += 1
        self._counters["read"] += 1
        title, text = page.get("title", ""), page.get("text", "")
        if not self._is_article(title):
            self._counters["not_article"] += 1
        elif "redirect" in page or text.lstrip()[:9].lower() == "#redirect":
            self._counters["redirect"] += 1
        elif not text.strip():
            self._counters["empty"] += 1
        else:
            url = self._url_prefix and self._url_prefix + url_title(title)
            self._articles.append(Record(ordinal, text, url, title))
        self._page = {}

    def _is_article(self, title: str) -> bool:
        if "ns" in self._page:
            in_main = self._page["ns"].strip() == "0"
        else:  # schemas before 0.6
            prefix, colon, _ = title.partition(":")
            in_main = not (colon and _normalised(prefix) in self._namespaces)
        return in_main and self._page.get("model", "wikitext") == "wikitext"

    def _doctype(self, *_: object) -> None:
        raise self._damage("expected a MediaWiki export, found a document type declaration")

    def _damage(self, reason: str) -> DamagedInput:
        return DamagedInput(self._path, f"byte {self._parser.CurrentByteIndex} of the XML", reason)


def url_title(title: str) -> str:
    """A title as Wikipedia writes it in addresses.

    "Who's (on) A/B?"  ->  "Who%27s_(on)_A/B%3F"
    """
    return quote(title.replace(" ", "_"), safe=";@$!*(),/:~")


def _normalised(namespace: str) -> str:
    return namespace.replace("_", " ").strip().casefold()
