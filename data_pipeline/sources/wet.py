"""Common Crawl WET archives (`CC-MAIN-….warc.wet.gz`): the text of each crawled page as a `conversion` record."""

from collections.abc import Iterator

from data_pipeline.sources.lines import decode
from data_pipeline.sources.record import Input, Intake, Record
from data_pipeline.sources.warc.records import WarcOptions, warc_records


class Options(WarcOptions):
    """What a WET source's `options` may say."""


def read(file: Input, intake: Intake) -> Iterator[Record]:
    """Every page that has an address, text and a date; the ordinal is the index among all records of the archive.

    Counts `read` (pages), `undecodable` (pages whose bytes aren't all UTF-8: those become U+FFFD), and what is dropped,
    the first that holds: `no_url`, `no_content`, `no_timestamp`. Damage: see `warc_records`. The language is the first
    (predominant) code of WARC-Identified-Content-Language, ISO 639-3, in crawls since 2018.

    TFDS's C4 splits these files by lines instead of by Content-Length: there a line of text that begins with "WARC",
    "Content-" or "CONTENT-" is taken for a header and lost, a line "WARC/1.0" ends the page, and one undecodable byte
    ends the file. Read by length, such text survives; counts differ from TFDS's by those pages and lines. The text is
    as it stands in the file; TFDS's stripped lines and dropped empty lines are the cleaning's.

        WARC-Target-URI: http://a.org/  WARC-Date: 2019-07-17T12:15:59Z  Content-Length: 12  …  Content-rich
          ->  Record(1, "Content-rich", "http://a.org/", timestamp="2019-07-17T12:15:59Z")
    """
    options = Options(**file.options)
    for record in warc_records(file, intake, "conversion", options):
        url = record.headers.get("warc-target-uri", "").strip("<>")  # WARC 1.0 showed it in brackets by mistake
        timestamp = record.headers.get("warc-date", "")
        text = decode(record.block, intake)
        missing = dropped(url, text, timestamp)
        if missing:
            intake.counters.drop(missing, f"{url} {text[:200]}")
            continue
        language = record.headers.get("warc-identified-content-language", "").partition(",")[0].strip()
        yield Record(record.ordinal, text, url, timestamp=timestamp, language=language)


def dropped(url: str, text: str, timestamp: str) -> str:
    """The rule by which a crawled page is dropped for what it lacks, or "".

    ("", "", "2019-07-17T12:15:59Z")  ->  "no_url"
    """
    if not url:
        return "no_url"
    if not text.strip():
        return "no_content"
    return "" if timestamp else "no_timestamp"
