"""Parts: Parquet files of documents.

A unit of the documents stage writes one or more parts. A unit of a later stage reads one part, or several small
neighbours of together at most `characters_per_part` characters, so that their keys or token ids fit into memory.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

from data_pipeline.base.arrow_tables import RowsFile, rows_file
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.documents import SCHEMA
from data_pipeline.dedup.places import Span
from data_pipeline.engine.work_units import Finished, Result
from data_pipeline.text.document import Counts, Document, Tally

_VALUES = attrgetter(*SCHEMA.names)
_TEXT, _TARGET = SCHEMA.names.index("text"), SCHEMA.names.index("target")
# The minimum that is counted per document and per line, because each also needs a key in memory.
_CHARACTERS_OF_A_DOCUMENT, _CHARACTERS_OF_A_LINE = 1000, 40
_ENOUGH_UNITS = 1000  # of a stage: with more, their fixed cost, such as files, outweighs their work


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part in the result of its unit.

    Attributes:
        first_id: the id of the first record. Sorted by it, parts hold documents in the order of their ids.
        documents: number of documents by split.
        characters: the sum of the documents' `size_of`, and of the characters of their targets.
        spans: the records of each file from which its documents were made.
        urls: the file of the URLs of dropped pages, which the dedup step "urls" compares, too; "" without this step.
    """

    path: str
    source: str
    first_id: str
    text_bytes: int
    documents: dict[str, int]
    characters: int
    urls: str = ""
    spans: list[Span] = field(default_factory=list)

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def files(self) -> list[str]:
        return [name for name in (self.path, self.urls) if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(WrittenPart):
    """A part with the checksums of its files, as a stage passes it on."""

    checksums: list[str]

    @classmethod
    def of(cls, part: WrittenPart, checksums: list[str]) -> "Part":
        return cls(**{one.name: getattr(part, one.name) for one in fields(part)}, checksums=checksums)


Item = TypeVar("Item", bound=Any)  # has a `source`


def parts_of(units: Sequence[Finished["PartsWritten"]]) -> list[Part]:
    """The parts that `units` have written, in order."""
    return [
        Part.of(part, [unit.outputs[name].sha256 for name in part.files])
        for unit in units
        for part in unit.result.parts
    ]


def grouped(parts: Sequence[Item], config: CorpusConfig) -> list[list[Item]]:
    """`parts`, in order, in the groups that units read: neighbours of a source, if there are many parts.

    A group has at most `characters_per_part` characters, and no more than 1,000 units need. The groups depend on the
    parts alone, not on the number of workers.
    """
    if len(parts) <= _ENOUGH_UNITS:
        return [[part] for part in parts]
    most = min(config.characters_per_part, sum(part.characters for part in parts) // _ENOUGH_UNITS)
    return neighbours(parts, lambda part: part.characters, most)


def neighbours(items: Sequence[Item], size: Callable[[Item], int], most: int) -> list[list[Item]]:
    """`items`, in order, in groups of one source with a sum of sizes of at most `most`. A larger item is alone."""
    groups: list[list[Item]] = []
    total = 0
    for item in items:
        total += size(item)
        if not groups or total > most or groups[-1][-1].source != item.source:
            groups.append([])
            total = size(item)
        groups[-1].append(item)
    return groups


def size_of(text: str) -> int:
    """The number of characters that a text counts as where parts are cut."""
    return max(_CHARACTERS_OF_A_DOCUMENT, _CHARACTERS_OF_A_LINE * text.count("\n"), len(text))


@dataclass
class Histograms:
    """Counts of kept documents by length (the power of two of the characters) and by language, and of those that have
    a URL."""

    lengths: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    with_urls: int = 0

    def add(self, document: Document) -> None:
        self.lengths[str(int(math.log2(len(document.text))))] += 1
        self.languages[document.language or "unknown"] += 1
        self.with_urls += bool(document.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsWritten(Result):
    """What the driver keeps of the result of a unit that writes parts. `with_urls`: number of documents with a URL."""

    parts: list[WrittenPart]
    with_urls: int

    @property
    def documents(self) -> dict[str, int]:
        """The documents of all parts by split."""
        return dict(sum((Counter(part.documents) for part in self.parts), Counter()))

    @property
    def text_bytes(self) -> int:
        return sum(part.text_bytes for part in self.parts)

    @property
    def files(self) -> list[str]:
        return [name for part in self.parts for name in part.files]


@dataclass(frozen=True, kw_only=True)
class PartsResult(PartsWritten):
    """The result of a unit that writes parts, with counts and examples of what was dropped, and histograms."""

    counts: Counts
    lengths: dict[str, int]
    languages: dict[str, int]

    @classmethod
    def of(cls, tally: Tally, parts: list[WrittenPart], histograms: Histograms, **others: Any) -> Self:
        """`others`: the fields of a subclass."""
        return cls(
            counts=tally.recorded(),
            parts=parts,
            lengths=dict(histograms.lengths),
            languages=dict(histograms.languages),
            with_urls=histograms.with_urls,
            **others,
        )


class PartFile:
    """Writes documents to one part."""

    def __init__(self, rows: RowsFile):
        self._rows = rows
        self.documents: Counter[str] = Counter()
        self.text_bytes = self.characters = 0

    def add(self, document: Document) -> None:
        characters = size_of(document.text) + len(document.target)
        row = tuple(map(str.encode, _VALUES(document)))
        self._rows.add(row, characters)
        self.documents[document.split] += 1
        self.characters += characters
        self.text_bytes += len(row[_TEXT]) + len(row[_TARGET])

    def describe(self, path: str, source: str, first_id: str) -> WrittenPart:
        documents = dict(sorted(self.documents.items()))
        return WrittenPart(path, source, first_id, self.text_bytes, documents, self.characters)


@contextlib.contextmanager
def part_file(store: Store, name: str) -> Iterator[PartFile]:
    """A part that appears in `store` when the block succeeds."""
    with rows_file(store, name, SCHEMA) as rows:
        yield PartFile(rows)
