"""The XML of a MediaWiki export: the tags at which its pages begin and end, and its head, which describes the wiki.

The tags are found in the bytes without parsing. "<" is always written "&lt;" inside a page's text, so they are reliable
even in a damaged page: after a page that no XML parser accepts, a reader continues at the next tag found here.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from data_pipeline.cleaning.wikitext.namespaces import normalised_namespace

PAGE, END, ROOT = b"<page", b"</page>", b"<mediawiki"

_TAG = re.compile(rb"<(?:/page\s*>|(?:page|mediawiki)(?=[\s/>]))")
_LONGEST = 64  # the most bytes of a tag that a chunk may cut


class Tag(NamedTuple):
    """A tag and the bytes before it.

    `before` has the bytes since the last tag. `name` is PAGE, END, ROOT, or b"" for more text without a tag. `position`
    counts from the first byte given. `beyond`: the tag begins in a chunk beyond the range.
    """

    before: bytes
    name: bytes
    position: int
    beyond: bool


def page_tags(chunks: Iterable[tuple[bytes, bool]]) -> Iterator[Tag]:
    """The tags in chunks of XML, (bytes, whether beyond the range), with all bytes between them.

    [(b"<mediawiki><pa", False), (b"ge>a</page>", True)]  ->  Tag(b"", ROOT, 0, False), Tag(b">", PAGE, 11, False),
    Tag(b">a", END, 18, True)
    """
    base, rest, boundary = 0, b"", None
    for chunk, beyond in chunks:
        if beyond and boundary is None:
            boundary = base + len(rest)
        data = rest + chunk
        done = 0
        for tag in _TAG.finditer(data):
            name = END if tag[0].startswith(b"</") else tag[0]
            position = base + tag.start()
            yield Tag(data[done : tag.start()], name, position, boundary is not None and position >= boundary)
            done = tag.end()
        cut = data.rfind(b"<", done)
        if cut < 0 or len(data) - cut >= _LONGEST:
            cut = len(data)
        if cut > done:
            yield Tag(data[done:cut], b"", base + cut, boundary is not None)
        base, rest = base + cut, data[cut:]
    yield Tag(rest, b"", base + len(rest), boundary is not None)


# Every wiki has these namespaces. A dump without <siteinfo> names no others.
_CANONICAL_NAMESPACES = (
    "media special talk user user_talk project project_talk file file_talk image image_talk mediawiki mediawiki_talk "
    "template template_talk help help_talk category category_talk"
)

_HIDDEN_KEYS = ("-2", "6", "14")  # numbers of the namespaces Media, File and Category


class Site:
    """What the head of an export says about its wiki."""

    def __init__(self, head: bytes):
        """`head`: from the XML declaration to the first page. Raises `ValueError` if it isn't the head of an export."""
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
