"""Common Crawl WET archives (`CC-MAIN-….warc.wet.gz`): the text of each crawled page as a `conversion` record."""

from collections.abc import Iterator

from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.sources.warc_records import WarcOptions, warc_records


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    """Every page that has an address, text and a date; the ordinal is the index among all records of the archive.

    Counts `read` (pages), `undecodable` (pages with bytes that aren't UTF-8, which become U+FFFD), and each dropped
    page under the first rule that applies: `no_url`, `no_content`, `no_timestamp`. For damage see `warc_records`. The
    language is the first (predominant) code of WARC-Identified-Content-Language, in ISO 639-3; crawls have it since
    2018.

    TFDS's C4 splits these files by lines instead of by Content-Length. It takes a line of text that begins with "WARC",
    "Content-" or "CONTENT-" for a header and loses it, ends the page at a line "WARC/1.0", and ends the file at an
    undecodable byte. This reader keeps that text, so its counts differ from TFDS's by those pages and lines. The text
    is unchanged: cleaning, not the reader, strips lines and drops empty ones.

        WARC-Target-URI: http://a.org/  WARC-Date: 2019-07-17T12:15:59Z  Content-Length: 12  …  Content-rich
          ->  Record(1, "Content-rich", "http://a.org/", timestamp="2019-07-17T12:15:59Z")
    """
    options = WarcOptions(**file.options)
    for record in warc_records(file, stats, "conversion", options):
        language = record.headers.get("warc-identified-content-language", "").partition(",")[0].strip()
        if page := record.page(_decode(record.block, stats), stats, language=language):
            yield page


def _decode(block: bytes, stats: ReadStats) -> str:
    r"""b"na\xefve"  ->  "na\ufffdve" """
    try:
        return block.decode()
    except UnicodeDecodeError:
        stats.counters["undecodable"] += 1
        return block.decode(errors="replace")
