"""Text from bytes as browsers decode them: labels and decoders of WHATWG's Encoding Standard, and a page's encoding.

https://encoding.spec.whatwg.org, of May 2026. Python's codecs have nearly all of its characters. This module has those
that they lack or map otherwise. Tests compare all sequences of two bytes with the standard's tables.

https://html.spec.whatwg.org/#determining-the-character-encoding
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import chain

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

UTF_8, UTF_16_LE, UTF_16_BE = "utf-8", "utf-16-le", "utf-16-be"
_UNICODE = (UTF_8, UTF_16_LE, UTF_16_BE)
REPLACEMENT = "replacement"  # the page can't be read: browsers show one U+FFFD
USER_DEFINED = "x-user-defined"

_REPLACED = ("replacement", "csiso2022kr", "hz-gb-2312", "iso-2022-cn", "iso-2022-cn-ext", "iso-2022-kr")
_MORE_LABELS = {  # than resiliparse has
    **dict.fromkeys(_REPLACED, REPLACEMENT),
    **dict.fromkeys(("x-mac-cyrillic", "x-mac-ukrainian"), "mac-cyrillic"),
    "x-user-defined": USER_DEFINED,
}
_DETECTED = {"cp949": "euc_kr", "mac-cyrillic": "mac-cyrillic"}  # names of the detector that are no labels


def charset_of(label: str) -> str | None:
    """The character set with this label, as `decoded` takes it; None if browsers don't know the label.

    " Latin1 "  ->  "cp1252"      "ks_c_5601-1987"  ->  "euc_kr"
    """
    return map_encoding_to_html5(label, fallback_utf8=False) or _MORE_LABELS.get(label.strip().lower())


def detected(data: bytes) -> str:
    """The character set that `data` looks like; UTF-8 if it looks like none."""
    found = detect_encoding(data, html5_compatible=False) or UTF_8
    return _DETECTED.get(found) or charset_of(found) or UTF_8


def codec_of(charset: str) -> str:
    """Python's codec that has most of the characters: "shift_jis"  ->  "cp932"."""
    return _CODECS.get(charset, charset)


def decoded(data: bytes, charset: str) -> tuple[str, bool]:
    r"""(text, whether every byte belongs to a character) of `data` in a character set of `charset_of`.

    Other bytes become U+FFFD or, in Windows' single-byte sets, control characters.

    (b"\x87@", "shift_jis")  ->  ("①", True)      (b"\x81", "cp1252")  ->  ("\x81", False)
    """
    if charset in _UNICODE:
        try:
            return data.decode(charset), True
        except UnicodeDecodeError:
            return data.decode(charset, errors="replace"), False
    if charset == REPLACEMENT:
        return "\ufffd" * bool(data), False
    if charset == "iso2022_jp":
        text = "".join(_iso_2022_jp(data))
        return text, "\ufffd" not in text
    if text := _sequences(charset).decoded_by_python(data):
        return text, True
    text = _sequences(charset).decoded(data)
    return text, not _OF_NO_CHARACTER.search(text)


_OF_NO_CHARACTER = re.compile("[\x80-\x9f\ufffd]")

_CODECS = {
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "gbk": "gb18030",
    "iso8859-11": "cp874",
    "shift_jis": "cp932",
    USER_DEFINED: "ascii",
}
_SINGLE = rb"[\0-\x7f]+|."
_DOUBLE = rb"[\0-\x7f]+|[\x81-\xfe].?|."
_PATTERNS = {  # of what is decoded at once: ASCII, then the bytes of one character
    "big5": _DOUBLE,
    "euc_jp": rb"[\0-\x7f]+|\x8f[\xa1-\xfe].?|[\x8e\x8f\xa1-\xfe].?|.",
    "euc_kr": _DOUBLE,
    **dict.fromkeys(("gbk", "gb18030"), rb"[\0-\x7f]+|[\x81-\xfe][0-9][\x81-\xfe][0-9]|[\x81-\xfe].?|."),
    "shift_jis": rb"[\0-\x7f]+|[\x81-\x9f\xe0-\xfc].?|.",
}


class _Sequences(dict[bytes, str]):
    """A cache from sequences of bytes, each a character or ASCII, to their text."""

    def __init__(self, codec: str, pattern: bytes, own: Mapping[bytes, str], renamed: Collection[bytes] = ()):
        """`own`: characters that `codec` lacks or maps otherwise. `renamed`: the sequences of `own` whose characters of
        the codec belong to no other sequence."""
        super().__init__(own)
        self._codec, self._pattern = codec, re.compile(pattern, re.DOTALL)
        self._renamed = [(_strictly(sequence, codec), own[sequence]) for sequence in renamed]
        unlike = {sequence: _strictly(sequence, codec) for sequence in own if sequence not in renamed}
        self._unlike = [(sequence, character) for sequence, character in unlike.items() if character]

    def decoded_by_python(self, data: bytes) -> str:
        """The text by Python's codec, which is fast; "" if the codec can't decode it or maps a character otherwise."""
        text = _strictly(data, self._codec)
        if any(character in text and sequence in data for sequence, character in self._unlike):
            return ""
        for character, own in self._renamed:
            text = text.replace(character, own)
        return text

    def decoded(self, data: bytes) -> str:
        return "".join(map(self.__getitem__, self._pattern.findall(data)))

    def __missing__(self, sequence: bytes) -> str:
        text = _strictly(sequence, self._codec)
        if not text:  # ASCII behind the first byte of a character is a character of its own
            text = "\ufffd" + (chr(sequence[-1]) if 1 < len(sequence) < 4 and sequence[-1] < 0x80 else "")
        if sequence[0] >= 0x80:
            self[sequence] = text
        return text


def _strictly(sequence: bytes, codec: str) -> str:
    try:
        return sequence.decode(codec)
    except UnicodeDecodeError:
        return ""


@cache
def _sequences(charset: str) -> _Sequences:
    codec = codec_of(charset)
    if charset in _PATTERNS:
        own, renamed = _OWN[charset]() if charset in _OWN else {}, _RENAMED.get(charset, ())
        return _Sequences(codec, _PATTERNS[charset], own, renamed)
    controls = {b: b.decode("latin-1") for b in map(_byte, range(0x80, 0xA0)) if not _strictly(b, codec)}
    return _Sequences(codec, _SINGLE, controls | _SINGLE_BYTES.get(charset, {}))


def _byte(value: int) -> bytes:
    return bytes([value])


_SINGLE_BYTES = {
    "cp1255": {b"\xca": "\u05ba"},
    "koi8-u": {b"\xae": "ў", b"\xbe": "Ў"},
    USER_DEFINED: {_byte(value): chr(0xF700 + value) for value in range(0x80, 0x100)},
}


def _gb18030() -> dict[bytes, str]:
    """GB 18030-2022, where Python has that of 2005; and 0x80 is Windows' euro."""
    own = {0x80: "€", 0xA3A0: "\u3000", 0xA8BC: "ḿ", 0x8135F437: "\ue7c7"}
    own |= zip((*range(0xA6D9, 0xA6E0), 0xA6EC, 0xA6ED, 0xA6F3), "︐︒︑︓︔︕︖︗︘︙", strict=True)
    own |= zip((0xFE59, 0xFE61, 0xFE66, 0xFE67, 0xFE6D, 0xFE7E, 0xFE90, 0xFEA0), "龴龵龶龷龸龹龺龻", strict=True)
    return {bytes.fromhex(f"{sequence:x}"): character for sequence, character in own.items()}


def _euc_jp() -> dict[bytes, str]:
    """JIS X 0208 with the rows of NEC and IBM. They are taken from Windows' Shift_JIS, which numbers the same rows."""
    own = {b"\x8f\xa2\xb7": "～"}
    for place in range(94 * 94):
        row, half = divmod(place, 188)
        windows = bytes([row + (0x81 if row < 31 else 0xC1), half + (0x40 if half < 63 else 0x41)])
        sequence = bytes([place // 94 + 0xA1, place % 94 + 0xA1])
        if (character := _strictly(windows, "cp932")) != _strictly(sequence, "euc_jp"):
            own[sequence] = character
    return own


def _big5() -> dict[bytes, str]:
    found = _BIG5.split()
    own = {}
    for first, characters in zip(found[::2], found[1::2], strict=True):
        lead, trail = bytes.fromhex(first)
        for character in characters:
            own[bytes([lead, trail])] = character
            trail = 0xA1 if trail == 0x7E else trail + 1
    return own


# The first sequence of each run, and its characters: HKSCS of 2008 and Windows' Big5. Python has HKSCS of 2004.
_BIG5 = """
877a 㡵𡵓𣚞𦀡㻬𥣞㫵竼龗𤅡𨤍𣇪𠪊𣉞䌊蒄龖鐯䤰蘓墖靊鈘秐稲晠権袝瑌篅枂稬剏遆㓦珄𥶹瓆鿇垳䤯呌䄱
87c7 𣚎堘穲𧭥讏䚮𦺈䆁𥶙箮𢒼鿈𢓁𢓉𢓌鿉蔄𣖻䂴鿊䓡𪷿拁灮鿋 a3c0 ␀␁␂␃␄␅␆␇␈␉␊␋␌␍␎␏␐␑␒␓␔␕␖␗␘␙␚␛␜␝␞␟␡€
8e69 箸 8e6f 簆 8e7e 糎 8eab 緒 8eb4 縝 8ecd 者 8ed0 耨 8f57 菁 8f69 蒨 8f6e 萏 8fcb 覦覩 8ffe 起 906d 都
907a 銹 90dc 靜 90f1 響 91bf 鼖 9244 蔃 92af 兙兛兝兞 92c8 鍮 92d1 瑹 9447 浧 94ca 禛 95d9 邗 9644 靝 96ed 瀞
96fc 嬨 9b76 爁 9b78 矗 9b7b 纇 9bc6 駖 9bde 釔 9bec 惞 9bf6 澶 9c42 輶 9c53 侻 9c62 營 9c68 鄄 9c6b 鷰 9c77 菏
9cbc 尐秣 9cd0 婧 9d57 輋 9d5a 筑 9dc4 拐 9ea9 恢 9eef 痹 9efd 汊 9f60 鬮 9f66 鼗 9fcb 僭 9fd8 弌 a063 蠏
a077 拎 a0d5 瑨 a0df 煢 a0e4 牐 a145 ‧ a14e ﹑ a1c2 ¯ a1e3 ～ a1f2 ⊕⊙ a241 ∕﹨ a244 ￥ a246 ￠￡
c6cf 廴 c6d3 无 c6d5 癶 c6d7 隶 c6de 〃仝 fa5f 倩 fa66 偽 fabd 包
fac5 卄 fad5 卿 fb48 嘅 fbb8 婷 fbf3 幵 fbf9 廐 fc4f 彘 fc6c 悤 fcb9 撐 fce2 晴 fcf1 杞 fdb7 沜渝 fdbb 港
fdf1 煮 fe52 猪 fe6f 瑜 feaa 瓩 fedd 砉
"""
_OWN = {
    "big5": _big5,
    "euc_jp": _euc_jp,
    **dict.fromkeys(("gbk", "gb18030"), _gb18030),
    "shift_jis": lambda: dict.fromkeys(map(_byte, (0xA0, 0xFD, 0xFE, 0xFF)), "\ufffd"),
}

_RENAMED = {"euc_jp": (b"\xa1\xc1", b"\xa1\xc2", b"\xa1\xdd", b"\xa1\xf1", b"\xa1\xf2", b"\xa2\xcc")}

_ESCAPE = re.compile(rb"\x1b(\([BIJ]|\$[@B])")
_PAIR = re.compile(rb"[\x21-\x7e][^\x1b]?|.", re.DOTALL)
_ASCII = dict.fromkeys((0x0E, 0x0F, 0x1B, *range(0x80, 0x100)), "\ufffd")
_ROMAN = _ASCII | {0x5C: "¥", 0x7E: "‾"}


def _iso_2022_jp(data: bytes) -> Iterator[str]:
    mode, parts = b"(B", _ESCAPE.split(data)
    for number, part in enumerate(parts):
        if number % 2:
            mode = part
        elif not part and 0 < number < len(parts) - 1:
            yield "\ufffd"  # nothing between two escapes
        elif mode in (b"(B", b"(J"):
            yield part.decode("latin-1").translate(_ASCII if mode == b"(B" else _ROMAN)
        elif mode == b"(I":
            yield from (chr(0xFF40 + value) if 0x21 <= value <= 0x5F else "\ufffd" for value in part)
        else:
            sequences = _sequences("euc_jp")
            for pair in _PAIR.findall(part):
                is_pair = len(pair) == 2 and max(pair) < 0x7F and min(pair) > 0x20
                yield sequences[bytes(value | 0x80 for value in pair)] if is_pair else "\ufffd"


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
