"""URLs as C4 compares them (TFDS `c4_utils`)."""

import re

_SCHEME = re.compile(r"https?://(www\.)?")
_TRACKING = re.compile(r"\?(utm_|ref|feed).*")


def normalize_url(url: str) -> str:
    """`url` without scheme, `www.`, tracking parameters and trailing slashes; letter case is kept.

    https://www.Example.com/a/?utm_source=x  ->  Example.com/a
    """
    return _TRACKING.sub("", _SCHEME.sub("", url)).rstrip("/")
