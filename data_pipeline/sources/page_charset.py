"""The character set of an HTML page, where browsers look for it: its first bytes, the HTTP header, the page itself.

https://html.spec.whatwg.org/#determining-the-character-encoding
"""

import re
from collections.abc import Iterator
from itertools import chain

from data_pipeline.sources.charsets import (
    REPLACEMENT,
    USER_DEFINED,
    UTF_8,
    UTF_16_BE,
    UTF_16_LE,
    charset_of,
    decoded,
    detected,
)

_LOOKED_AT = 1024  # bytes in which browsers look for <meta>, whatever stands there; later ones must be in the head
_HEAD = 1 << 16
_BEGINNINGS = (
    (b"\xef\xbb\xbf", UTF_8),
    (b"\xff\xfe", UTF_16_LE),
    (b"\xfe\xff", UTF_16_BE),
    (b"<\0?\0x\0", UTF_16_LE),
    (b"\0<\0?\0x", UTF_16_BE),
)


def page_text(body: bytes, label: str) -> tuple[str, bool]:
    """The text of a page whose HTTP header has this `label`, "" for none; and whether all of it can be decoded.

    The character set is the one that the first bytes, the header, a <meta> tag or <?xml … encoding=…?> says, in this
    order, else the one that the bytes look like. It is wrong if the page is UTF-8 throughout, or if it leaves most
    characters beyond ASCII undecodable: then the next is taken that decodes all of the page.
    """
    certain = next((charset for first, charset in _BEGINNINGS if body.startswith(first)), None)
    charsets = iter([certain]) if certain else _charsets(body, label)
    charset = next(charsets)
    text, whole = decoded(body, charset)
    if not whole and not certain and charset != REPLACEMENT:
        beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
        is_wrong = 2 * text.count("\ufffd") > beyond_ascii
        for other in chain([UTF_8], charsets if is_wrong else ()):
            reading, all_of_it = decoded(body, other)
            if all_of_it:
                return reading.removeprefix("\ufeff"), True
    return text.removeprefix("\ufeff"), whole or "\ufffd" not in text


def _charsets(body: bytes, label: str) -> Iterator[str]:
    """What the header, then the page, then its bytes say."""
    charset = charset_of(label)
    if charset in (UTF_16_LE, UTF_16_BE):  # often said of pages that aren't
        zeros = [body[place:_LOOKED_AT:2].count(0) for place in (0, 1)]
        charset = None if zeros[0] == zeros[1] else UTF_16_BE if zeros[0] > zeros[1] else UTF_16_LE
    if charset:
        yield charset
    if charset := _in_meta(body) or _in_xml(body):
        yield charset
    yield detected(body)


_ATTRIBUTE = rb"""[\s/]*([^\s/>][^\s/>=]*)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?"""
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_TAG = re.compile(rb"<!(?=--)(?:.*?-->|.*)|<(/?[a-z][^\s/>]*)((?:%b)*)|<[!/?][^>]*" % _ATTRIBUTE, re.I | re.DOTALL)
_CONTENT_CHARSET = re.compile(rb"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"'][^\s;]*))""", re.I)
_XML = re.compile(rb"""<\?xml[^>]*?\sencoding[\0-\x20]*=[\0-\x20]*(?:"([^">]*)"|'([^'>]*)')""")


def _in_meta(body: bytes) -> str | None:
    """The character set of the first <meta charset=…> or <meta http-equiv=content-type content=…charset=…>."""
    after_head = False
    for tag in _TAG.finditer(body, 0, _HEAD):
        name = (tag[1] or b"").lower()
        after_head |= name in (b"/head", b"body")
        if after_head and tag.start() >= _LOOKED_AT:
            return None
        if name != b"meta":
            continue
        attributes: dict[bytes, bytes] = {}
        for attribute in _ATTRIBUTES.finditer(tag[2]):
            attributes.setdefault(attribute[1].lower(), attribute[2] or attribute[3] or attribute[4] or b"")
        value = attributes.get(b"charset")
        if value is None and attributes.get(b"http-equiv", b"").lower() == b"content-type":
            found = _CONTENT_CHARSET.search(attributes.get(b"content", b""))
            value = next(filter(None, found.groups()), b"") if found else b""
        if charset := _of_ascii(value or b""):
            return "cp1252" if charset == USER_DEFINED else charset
    return None


def _in_xml(body: bytes) -> str | None:
    found = _XML.match(body, 0, _LOOKED_AT)
    return _of_ascii(found[1] or found[2] or b"") if found else None


def _of_ascii(label: bytes) -> str | None:
    """The character set with this label in a page whose tags are ASCII, so that it can't be UTF-16."""
    charset = charset_of(label.decode("latin-1"))
    return UTF_8 if charset in (UTF_16_LE, UTF_16_BE) else charset
