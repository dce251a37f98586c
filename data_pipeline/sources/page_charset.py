"""The text of an HTML page in the character set that browsers would choose: by the page and its HTTP header.

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

_LOOKED_AT = 1024  # bytes in which browsers look for <meta> anywhere; behind them, only in the head
_HEAD = 1 << 16
_BEGINNINGS = (
    (b"\xef\xbb\xbf", UTF_8),
    (b"\xff\xfe", UTF_16_LE),
    (b"\xfe\xff", UTF_16_BE),
    (b"<\0?\0x\0", UTF_16_LE),
    (b"\0<\0?\0x", UTF_16_BE),
)


def page_text(body: bytes, label: str) -> tuple[str, bool]:
    """(text, whether all bytes could be decoded) of a page. `label`: the character set in its HTTP header, or "".

    The character set is named by the first bytes, the header, a <meta> tag or <?xml … encoding=…?>, in this order; else
    it is guessed from the bytes. If it can't decode the page, UTF-8 is tried. If it can't decode most characters beyond
    ASCII either, the later names and the guess are tried. The first that decodes the whole page is taken.
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
    """The character sets by the header, by the page, and by its bytes."""
    charset = charset_of(label)
    if charset in (UTF_16_LE, UTF_16_BE):  # headers often say this of other pages
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
