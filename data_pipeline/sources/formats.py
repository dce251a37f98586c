"""All file formats by name: the reader and the options of each, and those of installed packages.

Every reader that ships raises `DamagedInput` for a file whose first bytes belong to another format.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.plugins import offered
from data_pipeline.sources import c4, csv, jsonl, pairs, plain_text, tables, wet, wikiextractor
from data_pipeline.sources.decompress import CorruptMember
from data_pipeline.sources.recognition import refuse_other_format
from data_pipeline.sources.record import Input, ReadFunction, ReadStats, Record, Source
from data_pipeline.sources.tables import Columns
from data_pipeline.sources.text_lines import RecordOptions, TextOptions
from data_pipeline.sources.warc import pages as warc
from data_pipeline.sources.warc.records import WarcOptions
from data_pipeline.sources.wikipedia import dump as wikipedia


def _counting_lost_records(declared: str, reader: ReadFunction) -> ReadFunction:
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        if declared in _SHIPPED:
            refuse_other_format(file, declared, stats)
        try:
            yield from reader(file, stats)
        except CorruptMember as damage:
            raise _with_lost_records(damage, file, stats, reader) from None

    return read


def _with_lost_records(damage: CorruptMember, file: Input, stats: ReadStats, reader: ReadFunction) -> CorruptMember:
    """The damage with the number of records that it costs, which are counted as read and as damaged.

    They are counted in the content that can't be trusted, up to the last byte that can be decompressed.
    """
    unverified, position = ReadStats(), damage.position
    try:
        deque(reader(replace(file, verified=False), unverified), maxlen=0)
    except DamagedInput as again:
        position = again.position  # to the byte
    lost = max(0, unverified.counters["read"] - stats.counters["read"])
    stats.counters["read"] += lost
    stats.counters["damaged"] += lost
    left_out = f"{counted(lost, 'record')} left out, as far as they can be counted, with all that follows in the file"
    return CorruptMember(damage.path, position, f"{damage.reason}; which byte is wrong can't be known; {left_out}")


_SHIPPED: dict[str, tuple[ReadFunction, type[Section]]] = {
    "wet": (wet.read, WarcOptions),
    "warc": (warc.read, warc.Options),
    "c4": (c4.read, RecordOptions),
    "wikipedia": (wikipedia.read, Section),
    "wikiextractor": (wikiextractor.read, TextOptions),
    "jsonl": (jsonl.read, jsonl.Options),
    "json": (jsonl.read_array, jsonl.Options),
    "csv": (csv.read, csv.Options),
    "text": (plain_text.read, plain_text.Options),
    "parquet": (tables.read_parquet, Columns),
    "arrow": (tables.read_arrow, Columns),
    "pairs": (pairs.read, pairs.Options),
}
_FORMATS = _SHIPPED | {name: (source.read, source.options) for name, source in offered("source", Source).items()}
READERS = {declared: _counting_lost_records(declared, read) for declared, (read, _) in _FORMATS.items()}
OPTIONS = {declared: options for declared, (_, options) in _FORMATS.items()}
