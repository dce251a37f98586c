"""Reads a file, or bytes, with one of the readers."""

import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources import formats
from data_pipeline.sources.record import Input, ReadStats, Record
from data_pipeline.text.document import LINE, SPAN, Counts
from tests.conftest import C4_SAMPLE

# of the Encoding Standard; each with its labels, and bytes with their text
_ENCODINGS = Path(__file__).parents[1] / "data" / "whatwg" / "encodings.tsv"


def encodings() -> list[dict[str, str]]:
    with _ENCODINGS.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def read(source: str, path: Path, **options: Any) -> tuple[list[Record], ReadStats]:
    stats = ReadStats()
    return list(formats.read(source, Input(str(path), options=options), stats)), stats


def read_bytes(source: str, path: Path, data: bytes, **options: Any) -> tuple[list[Record], ReadStats]:
    path.write_bytes(data)
    return read(source, path, **options)


def read_until_damage(source: str, path: Path, **options: Any) -> tuple[list[Record], ReadStats, DamagedInput]:
    """The records that a reader yields before it raises DamagedInput, which it must."""
    kept, stats = [], ReadStats()
    records = formats.read(source, Input(str(path), options=options), stats)
    with pytest.raises(DamagedInput) as damage:
        kept.extend(records)  # the records before the error
    return kept, stats, damage.value


def flat(counts: Counts) -> Counter[str]:
    """What was counted, by the names of `trace` and of the report's examples: {"read": 3, "line_policy": 1}."""
    numbers = {name: n for name, n in vars(counts).items() if isinstance(n, int) and n}
    found = Counter({**numbers, **counts.dropped_documents})
    for prefix, dropped in (
        (LINE, counts.dropped_lines),
        (SPAN, counts.dropped_spans),
        ("masked_", counts.masked_data),
    ):
        found.update({prefix + rule: n for rule, n in dropped.items()})
    return found


def c4_pages() -> list[str]:
    """The 1,000 texts of the shipped sample of C4."""
    with gzip.open(C4_SAMPLE, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]
