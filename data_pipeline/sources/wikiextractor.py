"""WikiExtractor output: `<doc id="…" url="…" title="…">` … `</doc>`, or JSON Lines from its option --json."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO
from xml.sax.saxutils import unescape

from data_pipeline.sources import jsonl
from data_pipeline.sources.format import Beginning, Format
from data_pipeline.sources.record import (
    Input,
    ReadStats,
    Record,
    TextOptions,
    decode,
    first_character,
    numbered_lines,
    open_text,
)

# Quotation marks in titles aren't escaped: only the end of the line ends a title.
_START = re.compile(rb'<doc id="[^"]*"(?: revid="[^"]*")? url="([^"]*)" title="(.*)">\s*')
_END = b"</doc>"
_QUOTES = {"&quot;": '"', "&#39;": "'", "&#x27;": "'"}


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """The text of every article, without the title that WikiExtractor repeats as its first line, and without escapes.

    The ordinal is the article's index. Counts `read` and `empty` (a title without text, dropped). These are damage: an
    article without `</doc>`, in another encoding or longer than `max_record_bytes`, and lines outside of articles.

        <doc id="1" url="https://a.org/?curid=1" title="A &amp; B">    A &amp; B    (empty)    A is first.    </doc>
          ->  Record(0, "A is first.", "https://a.org/?curid=1", "A & B")
    """
    options = TextOptions(**file.options)
    with open_text(file, options) as stream:
        first, stream = first_character(stream)
        if first == b"{":
            for written in jsonl.records(stream, stats, jsonl.Options(**options.model_dump())):
                if record := _article(written, stats):
                    yield record
        else:
            yield from _articles(stream, stats, options)


def _articles(stream: BinaryIO, stats: ReadStats, options: TextOptions) -> Iterator[Record]:
    ordinal, stray = -1, False
    start: re.Match[bytes] | None = None  # of the article being read
    position = ""
    body: list[bytes] | None = None  # None: too long
    size = 0
    for number, line in numbered_lines(stream, options.max_record_bytes):
        if opening := line is not None and _START.fullmatch(line):
            if start:
                stats.damaged(position, "the next article begins before its </doc>")
            start, position, body, size = opening, f"line {number}", [], 0
            ordinal += 1
            stats.counters.read += 1
            stray = False
        elif start and line == _END:
            try:
                record = _record(ordinal, start, body, stats, options)
            except ValueError as error:
                stats.damaged(position, str(error))
            else:
                if record:
                    yield record
            start = None
        elif start:
            size += len(line) + 1 if line is not None else options.max_record_bytes + 1
            if size > options.max_record_bytes:
                body = None
            elif body is not None and line is not None:
                body.append(line)
        elif (line is None or line.strip()) and not stray:
            stray = True  # one note for consecutive stray lines
            stats.counters.read += 1
            stats.damaged(f"line {number}", 'expected <doc id="…" url="…" title="…">')
    if start:
        stats.damaged(position, "the file ends before its </doc>")


def _record(
    ordinal: int, start: re.Match[bytes], body: list[bytes] | None, stats: ReadStats, options: TextOptions
) -> Record | None:
    """The article; None if it has no text. Raises ValueError if it isn't UTF-8 or is too long."""
    text = decode(None if body is None else b"\n".join(body), options)
    url, title = (decode(value, options) for value in start.groups())
    return _article(Record(ordinal, text, url, title), stats)


def _article(written: Record, stats: ReadStats) -> Record | None:
    """The article of a record as WikiExtractor has written it; None if it has no text."""
    first, _, rest = written.text.partition("\n")
    text = (rest if first.strip() == written.title.strip() else written.text).strip()
    if not text:
        stats.counters.document("empty")
        return None
    # --html-safe, on by default, escapes the text. Titles are as the dump escapes them.
    url, title = unescape(written.url, _QUOTES), unescape(written.title, _QUOTES)
    return replace(written, text=unescape(text), url=url, title=title)


class WikiExtractor(Format):
    """Articles in the form that WikiExtractor writes."""

    options, refuses_others = TextOptions, True
    beginning = Beginning(rb'\s*<doc id="[^"]*" (?:revid="[^"]*" )?url="', "WikiExtractor output")
    read = staticmethod(read)
