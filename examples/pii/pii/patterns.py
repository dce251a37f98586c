"""Personal data in text: mail addresses, IP addresses and phone numbers are replaced by placeholders.

The placeholders are Dolma's (Soldaini et al. 2024). As in FineWeb (Penedo et al. 2024), only public IP addresses are
replaced. Patterns go by the form of the text, not by its meaning.

- `email`: a local part of letters, digits and . _ % + - ' &, an @, and a domain name. In scripts without spaces, words
  may touch an address. There, a space or punctuation must follow the domain name, and precede the local part, which has
  at most 12 characters. Not replaced: the user in a URL (`https://user@host.org/`) or in an address of ssh
  (`git@host.org:path`), and files (`icon@2x.png`).
- `ip`: IPv4 and IPv6 in their usual forms, outside private and reserved networks. Not replaced, as probably versions:
  four numbers below 32 (1.2.3.4), and numbers after a word like "version" or "section".
- `phone`: international numbers (+49 30 1234567) with an assigned country code, of at least nine digits if the code has
  two. North American numbers with separators, with or without 1 in front: (212) 555-0123, (212)-555-0123, 212-555-0123,
  212.555.0123. Not replaced: digits without separators or after a currency sign, which may be any number.
"""

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator
from typing import Literal

from data_pipeline.text.document import Tally

Kind = Literal["email", "ip", "phone"]
PLACEHOLDERS: dict[Kind, str] = {
    "email": "|||EMAIL_ADDRESS|||",
    "ip": "|||IP_ADDRESS|||",
    "phone": "|||PHONE_NUMBER|||",
}
Span = tuple[int, int]


def mask(text: str, kinds: Collection[Kind], tally: Tally) -> str:
    """`text` with placeholders for personal data of these `kinds`. Each is counted by its kind, without examples.

    "Write to ann@example.org."  ->  "Write to |||EMAIL_ADDRESS|||."
    """
    for kind, find in _FINDERS.items():
        if kind not in kinds:
            continue
        parts, end = [], 0
        for start, stop in find(text):
            tally.masked(kind)
            parts += [text[end:start], PLACEHOLDERS[kind]]
            end = stop
        if parts:
            text = "".join([*parts, text[end:]])
    return text


# Letters and marks beyond ASCII, RFC 6531: Latin to Arabic, N'Ko to Sinhala, Georgian to Ethiopic, and Hangul.
_OTHERS = r"\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0300-\u037d\u0386-\u0559\u0561-\u0588\u0591-\u05bd\u05d0-\u05ea"
_OTHERS += r"\u0610-\u061a\u0620-\u0669\u066e-\u06d3\u06d5-\u06fc\u0750-\u077f\u07c0-\u07f5\u0900-\u0963\u0966-\u0df3"
_OTHERS += r"\u10a0-\u10fa\u10fc-\u1315\u1e00-\u1fbc\uac00-\ud7a3"
_ALNUM = f"A-Za-z0-9{_OTHERS}"
# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, and those of Chinese and Japanese.
_UNSPACED = r"\u0e01-\u0e4e\u0e81-\u0ecd\u1000-\u109d\u1780-\u17d3\u3005-\u3007\u3041-\u30ff\u3400-\u9fff"
_DOMAIN = re.compile(
    rf"@(?:(?:[{_ALNUM}](?:[{_ALNUM}-]{{0,61}}[{_ALNUM}])?\.){{1,8}}"
    rf"([A-Za-z]{{2,24}}|[{_OTHERS}]{{2,24}}|xn--[a-z0-9-]{{2,59}})(?![A-Za-z0-9_-])"
    rf"|(?:[{_ALNUM}{_UNSPACED}-]{{1,63}}\.){{1,8}}(?:[A-Za-z]{{2,24}}|[{_UNSPACED}]{{2,8}})(?![\w-]))"
)
_LOCAL_PART = re.compile(
    rf"(?:[{_ALNUM}_](?:[{_ALNUM}._%+'&-]{{0,63}}[{_ALNUM}_%+-])?|(?<!\w)[{_ALNUM}{_UNSPACED}._-]{{0,11}}[{_UNSPACED}])\Z"
)
_LONGEST_LOCAL_PART = 64
_PATH = re.compile(r":[\w~/.]")  # as in git@host.org:path
_FILES = frozenset(
    {"png", "jpg", "jpeg", "gif", "svg", "webp", "bmp", "ico", "css", "js", "html", "json", "tgz", "zip"}
)


def _emails(text: str) -> Iterator[Span]:
    if "@" not in text:
        return
    end = 0
    for domain in _DOMAIN.finditer(text):
        at = domain.start()
        local = _LOCAL_PART.search(text, max(end, at - _LONGEST_LOCAL_PART), at)
        if local is None or (domain[1] or "").lower() in _FILES or _PATH.match(text, domain.end()):
            continue
        if _is_user_of_url(text, local.start()):
            continue
        end = domain.end()
        yield local.start(), end


def _is_user_of_url(text: str, start: int) -> bool:
    """Whether the user or the password of a URL begins at `start`."""
    before = text[max(0, start - 80) : start]
    scheme = before.rfind("://")
    return scheme >= 0 and not re.search(r"[\s/?#=]", before[scheme + 3 :])


_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")
_IPV6 = re.compile(r"[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?:\.[0-9]{1,3}){3})?")
_VERSION = re.compile(
    r"(?:\b(?:v|ver|versions?|releases?|rev|revision|build|firmware|section|sec|chapter|clause|article|figure|fig|table"
    r"|appendix|item|rule)\b|§)[.:#=]?\s{0,2}\Z",
    re.IGNORECASE,
)
_BEFORE_VERSION = 16  # characters that are searched for such a word
_SMALL = 32
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
]  # listed here, since Python's own list changes with its version


def _ip_addresses(text: str) -> Iterator[Span]:
    end = 0
    for start, stop in sorted((*_of_version_4(text), *(_of_version_6(text) if ":" in text else ()))):
        if start >= end:  # else these digits are the end of an IPv6 address
            yield start, stop
            end = stop


def _of_version_4(text: str) -> Iterator[Span]:
    for found in _IPV4.finditer(text):
        start, stop = found.span()
        parts = found[0].split(".")
        if any(len(part) > 1 and part[0] == "0" for part in parts) or max(map(int, parts)) > 255:
            continue
        if not _stands_alone(text, start, stop, ".") or max(map(int, parts)) < _SMALL:
            continue
        if _follows_product(text, start) or _VERSION.search(text, max(0, start - _BEFORE_VERSION), start):
            continue
        if _is_public(found[0]):
            yield start, stop


def _of_version_6(text: str) -> Iterator[Span]:
    for found in _IPV6.finditer(text):
        start, stop = found.span()
        address = found[0]
        if address.endswith(":") and not address.endswith("::"):  # a colon after it
            address, stop = address[:-1], stop - 1
        if _stands_alone(text, start, stop, ":") and _is_public(address):
            yield start, stop


def _follows_product(text: str, start: int) -> bool:
    """Whether a single slash stands before, as in Browser/90.0.44.212."""
    return text[max(0, start - 1) : start] == "/" and text[max(0, start - 2) : start] != "//"


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not any(parsed in network for network in _NOT_PUBLIC if network.version == parsed.version)


_INTERNATIONAL = re.compile(
    # +1 has the North American form, and +7 is followed by 3, 4, 8 or 9: "+1 2012-10-11" is a time zone and a date
    r"\+(?:1[ .-]?(?:\([2-9][0-9]{2}\)|[2-9][0-9]{2})[ .-]?[2-9][0-9]{2}[ .-]?[0-9]{4}"
    r"|7[ .-]?\(?[3489][0-9]{2}\)?[ .-]?[0-9]{3}[ .-]?[0-9]{2}[ .-]?[0-9]{2}"
    # the codes that ITU has assigned (E.164, list of 2016)
    r"|(?:(?P<two>2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58])|21[12368]|2[2346][0-9]|25[0-8]|29[017-9]|3[57][0-9]"
    r"|38[0-35-79]|42[013]|5[09][0-9]|67[02-9]|68[0-35-9]|69[0-2]|80[08]|85[02356]|87[08]|88[01236]|96[0-8]|97[0-79]"
    r"|99[2-68])"
    r"[ .-]?(?:\(0?\)[ .-]?)?(?:\([0-9]{1,5}\)[ .-]?)?(?:[0-9][ .-]?){5,12}[0-9])"
)
_IN_PARENTHESES = re.compile(r"\([2-9][0-9]{2}\)[ .-]?[2-9][0-9]{2}[ .-][0-9]{4}")
_SEPARATED = re.compile(r"[2-9][0-9]{2}([.-])[2-9][0-9]{2}\1[0-9]{4}")
_COUNTRY = re.compile(r"(?<![\w.+-])1[ .-]?\Z")
_JOINED = re.compile(r"\+\Z|[$€£¥]\s?\Z|[^\W\d][-/]\Z")  # a sign, a price, or a name in a URL: item-212-555-0123
_SECOND_LINE = re.compile(r"/[0-9]{1,2}(?![\w/])")  # 212-555-0123/4
_DECIMAL = re.compile(r"\+[0-9]+\.[0-9]+")
_SHORTEST = 9  # digits of a number whose country code has two


def _phone_numbers(text: str) -> Iterator[Span]:
    found: list[Span] = []
    if "+" in text:
        found += [match.span() for match in _INTERNATIONAL.finditer(text) if _is_international(match)]
    for match in (*(_IN_PARENTHESES.finditer(text) if "(" in text else ()), *_SEPARATED.finditer(text)):
        start, stop = match.span()
        country = _COUNTRY.search(text, max(0, start - 3), start)
        start = country.start() if country else start
        if not _JOINED.search(text, max(0, start - 2), start):
            found.append((start, stop))
    end = 0
    for start, stop in sorted(found):
        if line := _SECOND_LINE.match(text, stop):
            stop = line.end()
        if start >= end and _stands_alone(text, start, stop, "./-"):
            yield start, stop
            end = stop


def _is_international(match: re.Match[str]) -> bool:
    digits = sum(map(str.isdigit, match[0].replace("(0)", "")))
    return not _DECIMAL.fullmatch(match[0]) and not (match["two"] and digits < _SHORTEST)


def _stands_alone(text: str, start: int, stop: int, joints: str) -> bool:
    """Whether no letter or digit touches the characters from `start` to `stop`, nor a digit after one of `joints`."""
    before, after = text[max(0, start - 2) : start], text[stop : stop + 2]
    if _is_of_word(before[-1:]) or _is_of_word(after[:1]):
        return False
    return not (before[:-1].isdigit() and before[-1] in joints) and not (after[1:].isdigit() and after[0] in joints)


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_FINDERS: dict[Kind, Callable[[str], Iterator[Span]]] = {"email": _emails, "ip": _ip_addresses, "phone": _phone_numbers}
