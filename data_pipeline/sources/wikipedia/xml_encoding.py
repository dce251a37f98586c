"""Converts XML to UTF-8. MediaWiki writes only UTF-8, but other tools may re-encode its exports."""

import codecs
import re
from collections.abc import Generator, Iterable
from itertools import chain

_DECLARED = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]{1,40})[\"']")
_BYTE_ORDER_MARK = "\ufeff"
_HEAD = 200  # bytes that hold the XML declaration, if there is one
_KNOWN = re.compile(
    r"utf-16(?:-[bl]e)?|utf-32(?:-[bl]e)?|ascii|iso8859-\d+|cp125\d|koi8-[ru]|gb18030|gbk|big5|shift_jis|euc_.*"
)

# XML forbids U+FFFF, so a page with undecodable bytes is refused rather than changed.
codecs.register_error("not-xml", lambda error: ("\uffff", getattr(error, "end", 0)))


def is_utf8(head: bytes) -> bool:
    return _encoding(head) == "utf-8"


def as_utf8(chunks: Iterable[tuple[bytes, bool]]) -> Generator[tuple[bytes, bool], None, None]:
    """Converts chunks of XML to UTF-8 from the encoding given by the byte order mark or the declaration.

    Raises `LookupError` for an unknown encoding.

        [(b"\\xff\\xfe<\\0a\\0/\\0>\\0", False)]  ->  (b"<a/>", False)
    """
    source = iter(chunks)
    first: list[tuple[bytes, bool]] = []
    head = b""
    for chunk, beyond in source:
        first.append((chunk, beyond))
        head += chunk
        if len(head) >= _HEAD:
            break
    encoding = _encoding(head)
    if encoding == "utf-8":
        bom = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        for chunk, beyond in first:
            yield chunk[bom:], beyond
            bom = max(0, bom - len(chunk))
        yield from source
        return
    decoder = codecs.getincrementaldecoder(encoding)("not-xml")
    beyond = False
    for chunk, beyond in chain(first, source):
        yield decoder.decode(chunk).replace(_BYTE_ORDER_MARK, "").encode(), beyond
    yield decoder.decode(b"", True).encode(), beyond


def _encoding(head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, b"<\0")):
        return "utf-16-le"
    if head.startswith((codecs.BOM_UTF16_BE, b"\0<")):
        return "utf-16-be"
    declared = _DECLARED.match(head.removeprefix(codecs.BOM_UTF8))
    name = codecs.lookup(declared[1].decode()).name if declared else "utf-8"
    if name in ("utf-8", "ascii"):
        return "utf-8"
    if not _KNOWN.fullmatch(name) or name.startswith(("utf-16", "utf-32")):  # would have shown above
        raise LookupError(f"unknown encoding: {name}")
    return name
