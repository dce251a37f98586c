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


def masked(text: str) -> str:
    """`text` with *** for each password in a URL.

    >>> masked("postgresql://me:pa/ss@db/mlflow, https://mlflow.example.org?token=abc")
    'postgresql://me:***@db/mlflow, https://mlflow.example.org?token=***'
    """
    for pattern in (_IN_URL, _IN_QUERY):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def without_login(url: str) -> str:
    """`url` without user and password, as it may be shown as a link."""
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
