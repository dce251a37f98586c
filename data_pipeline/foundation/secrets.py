"""Hides passwords in whatever is printed or recorded."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# user:password@ in a URL; a password may itself hold @ and /, so the last @ of the word ends it
_IN_URL = re.compile(r"(?P<before>\w://[^/\s:@\"'<>]*:)[^\s\"'<>]+(?=@)")
_IN_QUERY = re.compile(
    r"(?P<before>[?&](?:password|passwd|pwd|token|access_token|api_key|sig|secret)=)[^&\s\"'<>]+", re.I
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
    """`text`, of source code or a diff of it, also with *** for what looks like a key, a token or a password.

    It masks too much rather than too little: whatever is assigned to a name that ends in `token` is masked.

    >>> masked_code('+api_key = "abcdefgh"')
    '+api_key = "***"'
    """
    for pattern in (_PRIVATE_KEY, _KNOWN, _IN_CODE):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return masked(text)


def without_login(url: str) -> str:
    """`url` without user and password, so that it can be shown as a link."""
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
