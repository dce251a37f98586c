"""Numbers, names and tables as people read them, and text without passwords."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import filesize


def counted(number: int, noun: str) -> str:
    """1, "unit" -> "1 unit"; 2000, "unit" -> "2,000 units"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def first_few(names: Iterable[str], most: int) -> str:
    """["a", "b", "c"], 2 -> "a, b, …"."""
    found = list(names)
    return ", ".join(found[:most]) + (", …" if len(found) > most else "")


def duration(seconds: float) -> str:
    """90.0 -> "90 s", 5400.0 -> "1 h 30 min", 777600.0 -> "9.0 days"."""
    minutes = round(max(seconds, 0) / 60)
    if minutes < 2:
        return f"{max(seconds, 0):.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"


def human_size(size: float) -> str:
    """4_100_000 bytes -> "4.1 MB"."""
    return filesize.decimal(round(size))


_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    r"""A name from a file as one line without control characters: "a\nb" -> r"a\nb"."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def is_utf8(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8: it has no lone surrogates."""
    return _SURROGATE.search(text) is None


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows` as lines, whose first column is aligned to the left and the others to the right. The first row has the
    headings. A column without any value below its heading is left out, unless there are only headings."""
    headings, *others = rows
    columns = [column for column in range(len(headings)) if not others or any(row[column] for row in others)]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    lines = []
    for row in rows:
        first, *numbers = (row[column] for column in columns)
        lines.append(" ".join([first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip())
    return lines


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> list[str]:
    """The lines of a Markdown table. With `numbers`, all columns but the first are aligned to the right."""
    lines = [headings, ["---", *["--:" if numbers else "---"] * (len(headings) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


MASK = "***"
# user:password@ in a URL; a password may itself hold @ and /, so the last @ of the word ends it
_IN_URL = re.compile(r"(?P<before>\w://[^/\s:@\"'<>]*:)[^\s\"'<>]+(?=@)")
_IN_QUERY = re.compile(
    r"(?P<before>[?&](?:password|passwd|pwd|token|access_token|api_key|sig|secret"
    r"|(?:x-(?:amz|goog)-)?signature|x-amz-security-token)=)[^&\s\"'<>]+",
    re.I,
)
# a name that ends like a secret's, and the value that it is given; and tokens that are known by how they begin
_IN_CODE = re.compile(
    r"(?P<before>(?:password|passwd|secret|token|api_?key|access_?key|credentials?)[\"']?\s*[:=]\s*[\"']?)"
    r"[^\s\"',;)}\]]{6,}",
    re.I,
)
_KNOWN = re.compile(
    r"(?P<before>)\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,})"
)
_PRIVATE_KEY = re.compile(r"(?P<before>-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.S)


def masked(text: str) -> str:
    """`text` with *** for each password in a URL.

    >>> masked("postgresql://me:pa/ss@db/mlflow, https://mlflow.example.org?token=abc")
    'postgresql://me:***@db/mlflow, https://mlflow.example.org?token=***'
    """
    for pattern in (_IN_URL, _IN_QUERY):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def masked_code(text: str) -> str:
    """`text`, source code or a diff, with *** for each value that looks like a key, a token or a password.

    It masks too much rather than too little: any value that is assigned to a name ending in `token` is masked.

    >>> masked_code('+api_key = "abcdefgh"')
    '+api_key = "***"'
    """
    for pattern in (_PRIVATE_KEY, _KNOWN, _IN_CODE):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return masked(text)


def without_login(url: str) -> str:
    """`url` without user and password, to be shown as a link."""
    return re.sub(r"^(\w+://)[^/\s]*@", r"\1", url)


def masked_values(value: Any) -> Any:
    """Settings, nested in dicts and lists, with every text masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {key: masked_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(item) for item in value]
    return value
