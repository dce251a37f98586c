"""C4 as published (`c4-train.00000-of-01024.json.gz`): one JSON object per line with text, timestamp and url."""

import re
from collections.abc import Iterator

from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.jsonl import json_lines, string
from data_pipeline.sources.record import Input, ReadStats, Record, RecordOptions

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?Z?")


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """Every line's text, url and timestamp; the ordinal is the line's index.

    Copies of C4 differ: some have timestamps without "T" and "Z", `date` instead of `timestamp`, or only a text. All
    are read, and the timestamp becomes ISO 8601. Counts `read` (lines that aren't blank) and `empty` (blank texts,
    dropped). A line without the expected object is noted as damage and skipped.

        {"text":"Hello.","timestamp":"2019-04-25 12:57:54","url":"https://a.org/"}
          ->  Record(0, "Hello.", "https://a.org/", timestamp="2019-04-25T12:57:54Z")
    """
    options = RecordOptions(**file.options)
    with open_stream(file.path, file.verified) as stream:
        for number, line in json_lines(stream, stats, options):
            try:
                text, url = string(line, "text"), string(line, "url", required=False)
                timestamp = string(line, "timestamp", required=False) or string(line, "date", required=False)
            except ValueError as error:
                stats.damaged(f"line {number}", f"expected a JSON object with a text: {error}")
                continue
            if text.strip():
                yield Record(number - 1, text, url, timestamp=_TIMESTAMP.sub(r"\1T\2Z", timestamp, count=1))
            else:
                stats.counters["empty"] += 1
