"""What a file format can do: the base class of all formats, shipped or from installed packages."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, NamedTuple

from data_pipeline.base.config_file import Section
from data_pipeline.sources.record import Input, Range, ReadStats, Record


class Beginning(NamedTuple):
    """How files of a format begin: a regular expression for their first bytes, and what messages call such a file.

    `also`: other formats that may read such a file.
    """

    pattern: bytes
    description: str
    also: tuple[str, ...] = ()


class Format:
    """A file format. Its functions are static; a subclass has those that differ from the ones here.

    Attributes:
        options: the keys that a source may set under `options`.
        beginning: how the files begin. None: not in a way of their own.
        refuses_others: True: a file that certainly has another format is refused before it is read.
        pairs: True: a record is a text-to-text pair, with a target.
        divisible: True: `ranges` may divide a file.
    """

    options: ClassVar[type[Section]] = Section
    beginning: ClassVar[Beginning | None] = None
    refuses_others: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    @staticmethod
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        """Yields every record of `file`, or of its range; `file.options` has the settings. Notes damage in `stats`."""
        raise NotImplementedError

    @staticmethod
    def ranges(file: Input, target_bytes: int) -> list[Range]:
        """The ranges of `target_bytes` or somewhat more that together are `file`, each for one unit of work.

        The ranges of a file that hasn't changed are kept with the corpus.
        """
        return [Range()]

    @staticmethod
    def text_of(record: Record, holes: Counter[str] | None = None) -> str:
        """The text of a record, before cleaning. `holes` counts by name what the text lacks inside sentences, such as
        templates without a text."""
        return record.text

    @staticmethod
    def stays_together(options: dict[str, Any]) -> int:
        """Number of consecutive documents of a file that stay together in the shuffle; 1: none."""
        return 1

    @staticmethod
    def head(file: BinaryIO, size: int) -> bytes:
        """A smaller file of this format, with the first records of `file` and about `size` bytes, for a forecast."""
        return file.read(size)
