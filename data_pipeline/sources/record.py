"""What a reader is given, what it yields, and where it notes what came in and what was damaged."""

from dataclasses import dataclass, field
from typing import Any

from data_pipeline.text.tally import Tally

_DAMAGE_KEPT = 100


@dataclass(frozen=True, slots=True)
class Input:
    """A file to read, any fsspec path, or the bytes `start` … `stop` − 1 of one that can be read from there.

    `first_ordinal`: index, among all records of the file, of the first record in that range. `options`: what the
    source's config says of its format (names of columns, a task prefix).
    """

    path: str
    start: int = 0
    stop: int | None = None
    first_ordinal: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """One record of an input file, before cleaning.

    `ordinal`: index of the record among all records of its file, dropped ones included, so that it never depends on
    what the filters do. `text`: as the file has it (for Wikipedia: wikitext). `target`: of a text-to-text pair.
    `timestamp`: ISO 8601, as far as the file says. Empty strings: the file doesn't say. `hidden_namespaces`: of
    wikitext, the names that its wiki has for files and categories, links to which show no text.
    """

    ordinal: int
    text: str
    url: str = ""
    title: str = ""
    timestamp: str = ""
    language: str = ""
    target: str = ""
    hidden_namespaces: frozenset[str] = frozenset()


@dataclass(slots=True)
class Intake:
    """Notes on one input: `counters` by rule ("read" counts every record), and `damage` with its place.

    `damage`: (position, reason) of what can't be used while the rest of the file can; the first hundred are kept.
    Records lost to it are counted under "damaged", all of them. A reader that can't go on raises DamagedInput instead.
    """

    counters: Tally = field(default_factory=Tally)
    damage: list[tuple[str, str]] = field(default_factory=list)

    def damaged(self, position: str, reason: str) -> None:
        """One record, counted as read, is lost."""
        self.counters.drop("damaged", f"{position}: {reason}")
        self.damaged_between(position, reason)

    def damaged_between(self, position: str, reason: str) -> None:
        """Something other than a record is damaged or missing: no record is lost that can be counted."""
        if len(self.damage) < _DAMAGE_KEPT:
            self.damage.append((position, reason))
