"""What a package of one's own offers as the reader of a file format."""

from collections.abc import Callable, Iterator
from typing import ClassVar

from data_pipeline.foundation.config_file import Section
from data_pipeline.sources.record import Input, ReadStats, Record

ReadFunction = Callable[[Input, ReadStats], Iterator[Record]]


class Source:
    """A file format: `read` yields the records of a file of it, and `options` are the keys that a source may set."""

    options: ClassVar[type[Section]] = Section

    @staticmethod
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        """Every record of `file`, whose `options` have the settings. Notes on what is damaged go to `stats`."""
        raise NotImplementedError
