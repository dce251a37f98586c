"""The interface of readers: their input, the records they yield, and their notes on counts and damage."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from data_pipeline.foundation.config_file import Section
from data_pipeline.text.tally import Tally

_DAMAGE_KEPT = 100


class Range(NamedTuple):
    """Bytes `start` … `stop` − 1 of a file, to its end if `stop` is None.

    `first_ordinal` is the index of the range's first record among all records of the file.
    """

    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0


class Damage(NamedTuple):
    """Where a file can't be used, and why."""

    position: str
    reason: str


@dataclass(frozen=True, slots=True)
class Input:
    """A file to read (any fsspec path), or its bytes `start` … `stop` − 1 if reading can begin at `start`.

    `first_ordinal` is the index of the range's first record among all records of the file. `options` are those of the
    format in the source's config, such as names of columns. Without `verified`, the content may be wrong; see
    `open_stream`.
    """

    path: str
    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    verified: bool = True


@dataclass(slots=True)
class Record:
    """One record of an input file, before cleaning.

    `ordinal` is the record's index among all records of its file, dropped ones included, so that it never depends on
    filters. `text` is as in the file (wikitext for Wikipedia), `target` belongs to a text-to-text pair, and `timestamp`
    is ISO 8601 to the precision of the file. A field that the file doesn't give is "". `hidden_namespaces` are the
    names that the wiki uses for files and categories; links to them show no text. Only evaluation reads `targets`, the
    right answers of which `target` is the first, and `choices`, answers to choose from; empty if the file has no lists.
    """

    ordinal: int
    text: str
    url: str = ""
    title: str = ""
    timestamp: str = ""
    language: str = ""
    target: str = ""
    targets: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    hidden_namespaces: frozenset[str] = frozenset()


@dataclass(slots=True)
class ReadStats:
    """What a reader counts in one input: `counters` by rule ("read" counts every record), and `damage`.

    `damage` lists the parts that can't be used while the rest of the file can. The first hundred
    are kept, but "damaged" counts every record lost. A reader that can't continue raises DamagedInput instead.
    `unchecked`: the file's format may have checksums, and the file has none.
    """

    counters: Tally = field(default_factory=Tally)
    damage: list[Damage] = field(default_factory=list)
    unchecked: bool = False

    def damaged(self, position: str, reason: str) -> None:
        """Notes the loss of one record, which the reader has counted as read."""
        self.counters.drop("damaged", f"{position}: {reason}")
        self.damaged_between(position, reason)

    def damaged_between(self, position: str, reason: str) -> None:
        """Notes that something between records is damaged or missing, so that no lost record can be counted."""
        if len(self.damage) < _DAMAGE_KEPT:
            self.damage.append(Damage(position, reason))


ReadFunction = Callable[[Input, ReadStats], Iterator[Record]]


class Source:
    """A file format of an installed package: `read` yields the records of a file, and `options` are the keys that a
    source of the format may set."""

    options: ClassVar[type[Section]] = Section

    @staticmethod
    def read(file: Input, stats: ReadStats) -> Iterator[Record]:
        """Every record of `file`, whose `options` have the settings. Notes on what is damaged go to `stats`."""
        raise NotImplementedError


class FieldNames(Section):
    """Options of every format whose rows have names for their values."""

    text: str = "text"
    """Column or key of the text."""
    url: str = "url"
    """Column or key of the URL."""
    title: str = "title"
    """Column or key of the title."""
    language: str = "language"
    """Column or key of the language."""
    timestamp: str = "timestamp"
    """Column or key of the timestamp, by which `dedup.urls` chooses the newest page."""


def record_of(ordinal: int, row: Mapping[str, str], stats: ReadStats) -> Record | None:
    """The record of a row, whose values are named as in `FieldNames`; None for one without text, which is counted."""
    text = row.get("text", "")
    if not text.strip():
        stats.counters["empty"] += 1
        return None
    url, title, timestamp, language = (row.get(name, "") for name in ("url", "title", "timestamp", "language"))
    return Record(ordinal, text, url, title, timestamp, language)
