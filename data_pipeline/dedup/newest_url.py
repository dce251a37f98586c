"""Keeps the newest page of each URL (C4's rule, TFDS `c4_utils`)."""

import re
from collections.abc import Iterator
from datetime import date
from typing import Literal

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import KeyStep
from data_pipeline.text.document import Document, Dropped, Tally, normalize_url

_TIMESTAMP = re.compile(
    r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:[T ]([01]\d|2[0-4]):([0-5]\d)(?::([0-5]\d|60)(?:[.,](\d+))?)?"
    r"(?: ?(?:Z|UTC|([+-][01]\d)(?::?([0-5]\d))?))?)?)?)?",
    re.ASCII | re.IGNORECASE,
)
_DIGITS = 18  # of a fraction of a second: they fit into a word


class NewestUrl(KeyStep):
    """Of pages with the same normalised URL, the newest is kept; of equally new pages, the one with the smallest md5.

    Timestamps are compared as instants (`instant`). A timestamp in another form is older than any instant; such ones
    are compared by the first 16 bytes of their text. As in C4, pages that cleaning drops for their content are compared
    too. These have no id.
    """

    step: Literal["urls"] = "urls"

    version = 3
    order = 4
    columns = ("id", "url", "timestamp", "target")
    compares_dropped_pages = True

    @staticmethod
    def words(url: str, timestamp: str, kept: bool) -> tuple[int, ...]:
        """The words of a key: hash of the URL, the inverted time (3), md5 with `kept` pages before dropped ones."""
        if found := instant(timestamp):
            time = (*found, 0)
        else:
            text = timestamp.strip().encode("utf-8", "surrogatepass")[:16].ljust(16, b"\0")
            time = (0, int.from_bytes(text[:8], "big"), int.from_bytes(text[8:], "big"))
        newest_first = (2**64 - 1 - word for word in time)
        return hash64(normalize_url(url)), *newest_first, hash64(url) & ~1 | (not kept)

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.url and not document.target:
            yield 0, self.words(document.url, document.timestamp, bool(document.id))

    def without(self, document: Document, duplicates: list[int], tally: Tally) -> str | Dropped:
        return Dropped("duplicate_url", document.url) if duplicates else document.text


def instant(timestamp: str) -> tuple[int, int] | None:
    """(seconds since the day before the year 1, in UTC; 10⁻¹⁸ seconds) of an ISO 8601 date, or date and time.

    None for other text. A time without an offset is in UTC. Missing parts mean the earliest time: "2019-04" is
    "2019-04-01T00:00:00Z".
    """
    if (found := _TIMESTAMP.fullmatch(timestamp.strip())) is None:
        return None
    year, month, day, hour, minute, second, fraction, offset_hours, offset_minutes = found.groups()
    try:
        days = date(int(year), int(month or 1), int(day or 1)).toordinal()
    except ValueError:
        return None
    offset = 60 * int(offset_hours or 0) + int(f"{(offset_hours or '+')[0]}{offset_minutes or 0}")
    seconds = 86400 * days + 3600 * int(hour or 0) + 60 * (int(minute or 0) - offset) + int(second or 0)
    return seconds, int((fraction or "")[:_DIGITS].ljust(_DIGITS, "0"))
