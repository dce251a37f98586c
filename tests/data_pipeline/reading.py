"""Reads a file, or bytes, with one of the readers."""

from pathlib import Path
from typing import Any

import pytest

from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources import READERS, Input, Intake, Record


def read(source: str, path: Path, **options: Any) -> tuple[list[Record], Intake]:
    intake = Intake()
    return list(READERS[source](Input(str(path), options=options), intake)), intake


def read_until_damage(source: str, path: Path, **options: Any) -> tuple[list[Record], Intake, DamagedInput]:
    """The records that a reader yields before it raises DamagedInput, which it must."""
    kept, intake = [], Intake()
    records = READERS[source](Input(str(path), options=options), intake)
    with pytest.raises(DamagedInput) as damage:
        kept.extend(records)  # the records before the error
    return kept, intake, damage.value
