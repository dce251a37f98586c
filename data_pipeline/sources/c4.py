"""Published C4 (`c4-train.00000-of-01024.json.gz`): one JSON object per line with text, timestamp and url."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.errors import DamagedInput
from data_pipeline.sources.record import Record


def read(stream: BinaryIO, path: str, counters: Counter) -> Iterator[Record]:
    """Every line's text and url; the ordinal is the line's index. Counts `read`.

    Raises `DamagedInput` at the first line that isn't such an object.

        {"text":"Hello.","timestamp":"2019-04-25T12:57:54Z","url":"https://a.org/"}  ->  Record(0, "Hello.", "https://a.org/")
    """
    for ordinal, line in enumerate(stream):
        try:
            record = _parse(line)
        except (ValueError, RecursionError) as error:
            raise DamagedInput(path, f"line {ordinal + 1}", f"expected a JSON object with a text: {error}") from None
        counters["read"] += 1
        yield Record(ordinal, record["text"], record.get("url", ""))


def _parse(line: bytes) -> dict:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"found a JSON {type(record).__name__}")
    if not isinstance(record.get("text"), str):
        raise ValueError('no string under the key "text"')
    if not isinstance(record.get("url", ""), str):
        raise ValueError('no string under the key "url"')
    record["text"].encode()  # a lone surrogate ("\ud800") is valid JSON but no text, and can't be written anywhere
    return record
