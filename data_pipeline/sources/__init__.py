"""Readers, one per file format: `read(file, intake) -> Iterator[Record]`, and the options of each format.

Every reader raises `DamagedInput` for a file whose first bytes belong to another format.
"""

from collections.abc import Callable, Iterator

from data_pipeline.foundation.config_file import Section
from data_pipeline.sources import arrow, c4, csv, json_array, jsonl, pairs, parquet, table, text, wet, wikiextractor
from data_pipeline.sources.recognition import refuse_other_format
from data_pipeline.sources.record import Damage, Input, Intake, Range, Record
from data_pipeline.sources.warc import pages as warc
from data_pipeline.sources.wikipedia import dump as wikipedia

ReadFunction = Callable[[Input, Intake], Iterator[Record]]


def _for_its_format(declared: str, reader: ReadFunction) -> ReadFunction:
    def read(file: Input, intake: Intake) -> Iterator[Record]:
        refuse_other_format(file, declared)
        yield from reader(file, intake)

    return read


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
