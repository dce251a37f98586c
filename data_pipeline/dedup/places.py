"""Numbers of the documents of a unit, from which ids follow.

Keys have a document's unit and its number in 64 bits. An id is a source, a file and the ordinal of a record. The number
is the record's place among the records of the unit's files, so any unit can tell the id of any document.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.base.errors import FailedError
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.store import Store
from data_pipeline.dedup.keys import NO_DOCUMENT
from data_pipeline.engine.merging import read_names


@dataclass(frozen=True, slots=True)
class Span:
    """Records `first` to `end`, not included, of a file with the name `file`, which begins with the source's."""

    file: str
    first: int
    end: int


class Places:
    """The documents of a unit with these `spans`, in the order of ids."""

    def __init__(self, spans: Sequence[Span]):
        self._starts, self._files = list[int](), list[str]()
        self._offsets: dict[str, int] = {}  # from the ordinal of a file's record to the number
        total = 0
        for span in spans:
            if span.file not in self._offsets:
                self._starts.append(total)
                self._files.append(span.file)
                self._offsets[span.file] = total - span.first
            total = self._offsets[span.file] + span.end
        if total >= NO_DOCUMENT:
            raise FailedError(f"{spans[0].file}: {total:,} records are too many for a unit; lower characters_per_part")

    def number(self, identity: str) -> int:
        """The number of the document with this id."""
        file, _, ordinal = identity.rpartition("/")
        return self._offsets[file] + int(ordinal)

    def identity(self, number: int) -> str:
        """The id of the document with this number."""
        file = self._files[bisect_right(self._starts, number) - 1]
        return f"{file}/{number - self._offsets[file]:09d}"


class Identities:
    """A function from a document, unit << 32 | number, to its id; "" for a page that cleaning dropped.

    `listed`: the file with the spans of each unit, as JSON (`write_names`).
    """

    def __init__(self, store: Store, listed: str):
        self._store, self._listed = store, listed
        self._places: dict[int, Places] = {}

    def __call__(self, document: int) -> str:
        unit, number = divmod(document, 1 << 32)
        if number == NO_DOCUMENT:
            return ""
        if unit not in self._places:
            spans = read_names(self._store, self._listed)[unit]
            self._places[unit] = Places(parse_json(spans, list[Span], self._listed))
        return self._places[unit].identity(number)
