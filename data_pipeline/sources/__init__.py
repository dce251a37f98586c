"""Readers, one per file format: `read(stream, path, counters) -> Iterator[Record]`."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO

from data_pipeline.sources import c4, wikipedia
from data_pipeline.sources.record import Record

Reader = Callable[[BinaryIO, str, Counter], Iterator[Record]]

READERS: dict[str, Reader] = {"wikipedia": wikipedia.read, "c4": c4.read}

__all__ = ["READERS", "Reader", "Record"]
