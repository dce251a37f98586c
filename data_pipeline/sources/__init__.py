"""Readers, one per file format: `read(file, intake) -> Iterator[Record]`, and the options of each format.

Every reader raises `DamagedInput` for a file whose first bytes belong to another format.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.foundation.progress import counted
from data_pipeline.sources import arrow, c4, csv, json_array, jsonl, pairs, parquet, table, text, wet, wikiextractor
from data_pipeline.sources.compression.stream import CorruptMember
from data_pipeline.sources.recognition import refuse_other_format
from data_pipeline.sources.record import Damage, Input, Intake, Range, Record
from data_pipeline.sources.warc import pages as warc
from data_pipeline.sources.wikipedia import dump as wikipedia

ReadFunction = Callable[[Input, Intake], Iterator[Record]]


def _for_its_format(declared: str, reader: ReadFunction) -> ReadFunction:
    def read(file: Input, intake: Intake) -> Iterator[Record]:
        refuse_other_format(file, declared)
        try:
            yield from reader(file, intake)
        except CorruptMember as damage:
            raise _counted(damage, file, intake, reader) from None

    return read


def _counted(damage: CorruptMember, file: Input, intake: Intake, reader: ReadFunction) -> CorruptMember:
    """The damage with the number of records that it costs, which are counted as read and as damaged.

    They are counted in the content that can't be trusted, up to the last byte that can be decompressed.
    """
    unverified, position = Intake(), damage.position
    try:
        deque(reader(replace(file, verified=False), unverified), maxlen=0)
    except DamagedInput as again:
        position = again.position  # to the byte
    lost = max(0, unverified.counters["read"] - intake.counters["read"])
    intake.counters["read"] += lost
    intake.counters["damaged"] += lost
    left_out = f"{counted(lost, 'record')} left out, as far as they can be counted, with all that follows in the file"
    return CorruptMember(damage.path, position, f"{damage.reason}; which byte is wrong can't be known; {left_out}")


_READERS: dict[str, ReadFunction] = {
    "wet": wet.read,
    "warc": warc.read,
    "c4": c4.read,
    "wikipedia": wikipedia.read,
    "wikiextractor": wikiextractor.read,
    "jsonl": jsonl.read,
    "json": json_array.read,
    "csv": csv.read,
    "text": text.read,
    "parquet": parquet.read,
    "arrow": arrow.read,
    "pairs": pairs.read,
}
READERS = {declared: _for_its_format(declared, reader) for declared, reader in _READERS.items()}

OPTIONS: dict[str, type[Section]] = {
    "wet": wet.Options,
    "warc": warc.Options,
    "c4": c4.Options,
    "wikipedia": Section,
    "wikiextractor": wikiextractor.Options,
    "jsonl": jsonl.Options,
    "json": jsonl.Options,
    "csv": csv.Options,
    "text": text.Options,
    "parquet": table.Columns,
    "arrow": table.Columns,
    "pairs": pairs.Options,
}

__all__ = ["OPTIONS", "READERS", "Damage", "Input", "Intake", "Range", "ReadFunction", "Record"]
