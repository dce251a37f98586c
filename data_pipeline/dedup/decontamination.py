"""Decontamination: drops documents that contain an item of an evaluation set.

Items are read from JSON Lines, tab-separated columns or lines of text. One task writes the n-grams of all items
(`Index`); each reading that has the step looks for them in its documents.

A document contains an item if any 13 successive words of one of the item's texts are also successive words of the
document, as for GPT-3 (Brown et al. 2020, appendix C). A text of 8 to 12 words must be in the document as a whole:
GPT-3's n also goes from 13 down to 8, by the lengths of a set's items. Words consist of letters with their marks and of
digits, in lower case and NFKC. In a script without spaces, as many letters count as 13 words have on average
(`text/words.py`). GPT-3's authors cut out the match and its surroundings; here, the whole document is dropped, as for
Dolma (Soldaini et al. 2024).

Words are hashed 100 kB at a time. A table with a byte for each range of hashes rules out nearly all runs of words; it
fits into a core's cache. The other runs are looked up by hashes of 128 bits.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from data_pipeline.base.config_file import Locations, Section
from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.formatting import first_few
from data_pipeline.base.paths import opening
from data_pipeline.base.safetensors_file import Arrays, write_arrays
from data_pipeline.base.store import Store
from data_pipeline.engine.context import Context
from data_pipeline.sources.formats import refuse_other_format
from data_pipeline.sources.jsonl import json_object
from data_pipeline.sources.record import Input, ReadStats, RecordOptions, open_text, parsed_lines
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.step import Row, Rule
from data_pipeline.text.words import LONGEST_NGRAM, Words, batches, normalised

INDEX = ".stages/evaluation-sets/ngrams.safetensors"
_SHOWN = 8  # names in a message
_DOCUMENTS_AT_ONCE = 100  # in which items are looked for
_SLOTS_PER_NGRAM, _FEWEST_BITS, _MOST_BITS = 32, 16, 25  # of the table


class EvaluationSet(Section):
    """An evaluation set: its items must not be in the corpus."""

    name: str = Field(min_length=1)
    """The set's name in the report."""
    path: Locations
    """Its files, plain or compressed: a path, a glob, or a list of them, local or as fsspec URLs."""
    format: Literal["jsonl", "tsv", "text"] = "jsonl"
    """How a file holds items. `jsonl`: an object a line. `tsv`: tab-separated columns. `text`: the line itself."""
    fields: list[str | int] = []
    """The fields with an item's texts; each text is looked for by itself. jsonl: keys (`choices.text`: the key `text`
    of the object, or of each object in the list, under `choices`). tsv: names in the first line or, without such a
    line, numbers of columns from 1. text: none."""

    @model_validator(mode="after")
    def _fields_suit_the_format(self) -> "EvaluationSet":
        numbers = [field for field in self.fields if isinstance(field, int)]
        if self.format == "text" and self.fields:
            raise ValueError("fields: format text has none, since its lines are the items")
        if self.format != "text" and not self.fields:
            raise ValueError(f"fields: format {self.format} needs the names of the fields that hold an item's texts")
        if numbers and (self.format != "tsv" or len(numbers) < len(self.fields) or min(numbers) < 1):
            raise ValueError("fields: expected names, or for tsv without a line of names only numbers from 1")
        return self


class DecontaminationConfig(Section):
    """Drops each document that contains a run of words of an evaluation set's item, whatever the case and the
    punctuation. In scripts without spaces, as many letters count as the words have on average."""

    sets: list[EvaluationSet] = []
    """The evaluation sets. []: off."""
    ngram: int = Field(13, ge=2, le=LONGEST_NGRAM)
    """Number of successive words of an item that must be in a document. GPT-3: 13."""
    shortest: int = Field(8, ge=1)
    """Minimum number of words of a text that is looked for. A text of fewer words than `ngram` must be in a document as
    a whole. GPT-3: 8."""

    @field_validator("sets")
    @classmethod
    def _names_are_unique(cls, sets: list[EvaluationSet]) -> list[EvaluationSet]:
        names = [one.name for one in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"each set needs a different name, got {', '.join(names)}")
        return sets

    @model_validator(mode="after")
    def _shortest_is_no_longer_than_an_ngram(self) -> "DecontaminationConfig":
        if self.shortest > self.ngram:
            raise ValueError(f"shortest: {self.shortest} is more than ngram, {self.ngram}")
        return self


@dataclass(frozen=True, slots=True)
class Item:
    """An item of an evaluation set: the line it is on, and its texts."""

    line: int
    texts: list[str]


class _Strict(ReadStats):
    """Raises at damage: a damaged item couldn't be looked for."""

    def damaged_between(self, position: str, reason: str) -> None:
        raise DamagedInput("", position, reason)


def read_items(path: str, evaluation_set: EvaluationSet) -> Iterator[Item]:
    """The items of one file of a set, in order, without blank lines.

    Raises UserError, which names the file, the line and the set, if the file has another format or is damaged, or if an
    item lacks one of the fields.
    """
    readers = {
        "jsonl": _jsonl_items,
        "tsv": _tsv_items,
        "text": lambda path, _: (Item(number, [line]) for number, line in _lines(path)),
    }
    try:
        with opening(path):
            refuse_other_format(Input(path), evaluation_set.format)
            yield from readers[evaluation_set.format](path, evaluation_set)
    except DamagedInput as error:
        context = f"format {evaluation_set.format} of evaluation set {evaluation_set.name!r}"
        raise UserError(f"{path.removeprefix('file://')}: {error.position}: {error.reason} ({context})") from None


def _jsonl_items(path: str, evaluation_set: EvaluationSet) -> Iterator[Item]:
    options = RecordOptions()
    with open_text(Input(path), options) as stream:
        for number, record in parsed_lines(stream, _Strict(), options, json_object):
            texts: list[str] = []
            for field in map(str, evaluation_set.fields):
                try:
                    texts += _texts(record, [field] if field in record else field.split("."))
                except LookupError:
                    reason = f'no field "{field}"; it has {first_few(record, _SHOWN)}'
                    raise DamagedInput(path, f"line {number}", reason) from None
                except TypeError as error:
                    reason = f'field "{field}": expected text, found {error}'
                    raise DamagedInput(path, f"line {number}", reason) from None
            yield Item(number, texts)


def _texts(value: Any, keys: list[str]) -> list[str]:
    """The texts under `keys` in a JSON value; none in null. Raises LookupError, or TypeError with the type found.

    {"choices": [{"text": "Ulm"}, {"text": "Bonn"}]}, ["choices", "text"]  ->  ["Ulm", "Bonn"]
    """
    if value is None:
        return []
    if isinstance(value, list):
        return [text for one in value for text in _texts(one, keys)]
    if keys:
        if not isinstance(value, dict):
            raise LookupError
        return _texts(value[keys[0]], keys[1:])
    if not isinstance(value, str):
        raise TypeError(f"a JSON {type(value).__name__}")
    return [value]


def _tsv_items(path: str, evaluation_set: EvaluationSet) -> Iterator[Item]:
    columns = [field - 1 for field in evaluation_set.fields if isinstance(field, int)]
    for number, line in _lines(path):
        cells = line.split("\t")
        if not columns:  # the first line names them
            if missing := [field for field in evaluation_set.fields if field not in cells]:
                reason = f'no column "{missing[0]}"; it has {first_few(cells, _SHOWN)}'
                raise DamagedInput(path, f"line {number}", reason)
            columns = [cells.index(str(field)) for field in evaluation_set.fields]
        elif max(columns) >= len(cells):
            raise DamagedInput(path, f"line {number}", f"no column {max(columns) + 1}; it has {len(cells)}")
        else:
            yield Item(number, [cells[column] for column in columns])


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that isn't blank."""
    options = RecordOptions()
    with open_text(Input(path), options) as stream:
        yield from parsed_lines(stream, _Strict(), options, str)


@dataclass(frozen=True)
class Match:
    """A run of `words` that is in the `items` and in text `number`, from its word `word` on."""

    number: int
    word: int
    items: list[int]
    words: str


class Ngrams:
    """The n-grams of numbered items: all runs of 13 words of long texts, and shorter texts as a whole.

    An n-gram is looked up in a text only if its head, its first words, is probably there. `arrays` has `first`,
    `second`, `items` (n,): two hashes of each n-gram, sorted, and an item that has it; `heads.N`: hashes of the heads
    of N words; `more` (k, 2): N, and the number of words that n-grams have after such a head.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = arrays
        self._first, self._second, self._items = (arrays[name] for name in ("first", "second", "items"))
        self._more: dict[int, list[int]] = {}
        for head, number in arrays["more"].tolist():
            self._more.setdefault(head, []).append(number)
        self._likely = {head: _Likely(arrays[f"heads.{head}"]) for head in self._more}

    @classmethod
    def of(cls, texts: Iterable[tuple[int, str]], config: DecontaminationConfig) -> "Ngrams":
        """The n-grams of the texts of numbered items; an item may have several texts."""
        tables = [np.zeros((0, 3), dtype=np.uint64)]
        heads: dict[int, list[np.ndarray]] = {}
        more: dict[int, set[int]] = {}
        for words in batches(texts, normalised(), config.ngram):
            ngram_stops, head_stops = words.stops(config.ngram), words.stops(config.shortest)
            long = np.flatnonzero(words.within(np.arange(len(ngram_stops)), ngram_stops))
            whole = [at for at, chunk in enumerate(words.chunks) if words.count[at] and not chunk.word]
            short, ends = words.first[whole], (words.first + words.count)[whole]
            enough = (ngram_stops[short] > ends) & (head_stops[short] <= ends)
            for head, runs, stops in (
                (config.ngram, long, ngram_stops[long]),
                (config.shortest, short[enough], ends[enough]),
            ):
                if len(runs):
                    hashes = (words.hashes(runs, stops, seed) for seed in (0, 1))
                    tables.append(np.stack([*hashes, words.positions[runs]], axis=1))
                    stops_of_heads = words.stops(head)[runs]
                    heads.setdefault(head, []).append(words.hashes(runs, stops_of_heads, 0))
                    more.setdefault(head, set()).update((stops - stops_of_heads).tolist())
        table = np.concatenate(tables)
        table[:, 2] >>= np.uint64(32)  # the number of the text
        table = table[np.lexsort(table.T[::-1])]
        table = table[np.append(True, (table[1:] != table[:-1]).any(axis=1))[: len(table)]]
        first, second, items = (np.ascontiguousarray(column) for column in table.T)
        lengths = [(head, number) for head in sorted(more) for number in sorted(more[head])]
        arrays = {"first": first, "second": second, "items": items.astype(np.uint32)}
        arrays["more"] = np.array(lengths, dtype=np.int64).reshape(-1, 2)
        return cls(arrays | {f"heads.{head}": np.unique(np.concatenate(heads[head])) for head in sorted(heads)})

    @property
    def known(self) -> np.ndarray:
        """The items with a text that is long enough to be found, ascending."""
        return np.unique(self._items)

    def matches(self, texts: Iterable[tuple[int, str]]) -> Iterator[Match]:
        """Every n-gram of items in numbered texts."""
        longest = max((head + number for head, more in self._more.items() for number in more), default=1)
        for words in batches(texts, normalised(), longest):
            for head, more in self._more.items():
                runs = self._likely[head].among(words.runs(head, 0))
                stops = words.stops(head)[runs]
                for number in more:
                    inside = words.within(runs, stops + number)
                    yield from self._matches(words, runs[inside], stops[inside] + number)

    def _matches(self, words: Words, runs: np.ndarray, stops: np.ndarray) -> Iterator[Match]:
        """Every n-gram of items among the runs from the words `runs` up to, not including, `stops`."""
        hashes = words.hashes(runs, stops, 0)
        found = np.searchsorted(self._first, hashes)
        equal = np.flatnonzero(self._first.take(found, mode="clip") == hashes)
        if not len(equal):
            return
        runs, stops, found = runs[equal], stops[equal], found[equal]
        until = np.searchsorted(self._first, hashes[equal], "right")
        seconds = words.hashes(runs, stops, 1)
        for run, stop, second, *bounds in zip(runs.tolist(), stops.tolist(), seconds, found, until, strict=True):
            same = slice(*bounds)
            if items := self._items[same][self._second[same] == second].tolist():
                text = words.text[words.starts[run] : words.ends[stop - 1]]
                position = int(words.positions[run])
                yield Match(position >> 32, position & 0xFFFFFFFF, items, " ".join(text.split()))


class _Likely:
    """A table with a byte for each range of hashes: whether any of `hashes` is in it."""

    def __init__(self, hashes: np.ndarray):
        bits = min(_MOST_BITS, max(_FEWEST_BITS, (_SLOTS_PER_NGRAM * len(hashes)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=bool)
        self._table[self._slots(hashes)] = True

    def among(self, hashes: np.ndarray) -> np.ndarray:
        """(k,): the indices of the `hashes` (n,) that are in the table, and of few that aren't."""
        return np.flatnonzero(self._table.take(self._slots(hashes), mode="clip"))

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> self._shift).view(np.int64)


class Index:
    """The n-grams of all sets, and the set, file and line of each item."""

    def __init__(self, ngrams: Ngrams, items: np.ndarray, sets: list[str], files: list[str]):
        self.ngrams, self._items, self._sets, self._files = ngrams, items, sets, files
        self._first = np.searchsorted(items[:, 0], np.arange(len(sets)))

    def set_of(self, item: int) -> str:
        return self._sets[self._items[item, 0]]

    def number_of(self, item: int) -> int:
        """The number of the item in its set, from 0."""
        return item - int(self._first[self._items[item, 0]])

    def name_of(self, item: int) -> str:
        """ "boolq, dev.jsonl line 18" """
        of_set, file, line = self._items[item].tolist()
        return f"{self._sets[of_set]}, {self._files[file]} line {line}"

    def write(self, store: Store) -> None:
        names = {"names": json.dumps([self._sets, self._files])}  # one entry: their order isn't fixed
        with store.put(INDEX) as path:
            write_arrays(path, {**self.ngrams.arrays, "where": self._items}, names)

    @classmethod
    def read(cls, store: Store) -> "Index":
        file = Arrays(store, INDEX)
        arrays = {name: file[name] for name in file}
        sets, files = json.loads(file.metadata["names"])
        return cls(Ngrams(arrays), arrays["where"], sets, files)


class Decontamination(DecontaminationConfig, Rule):
    """Drops documents with items of evaluation sets. Counts the documents, and notes the items found, by set."""

    step: Literal["decontamination"] = "decontamination"
    sets: list[EvaluationSet] = Field(min_length=1)
    """The evaluation sets."""

    version = 5
    prepared = True

    def described(self) -> dict[str, object]:
        return self.model_dump(exclude={"sets": {"__all__": {"path"}}})

    def left(self, context: Context, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
        index = context.cached("n-grams", lambda: Index.read(context.store))
        remaining = iter(rows)
        while batch := list(islice(remaining, _DOCUMENTS_AT_ONCE)):
            evidence = _evidence(index, ((number, left) for number, _, left in batch if left is not None), tally)
            for number, document, left in batch:
                if left is not None and number in evidence:
                    tally.drop(self.step, left, Dropped("contaminated", evidence[number], evidence[number]))
                    left = None
                yield number, document, left


def _evidence(index: Index, documents: Iterable[tuple[int, Document]], tally: Tally) -> dict[int, str]:
    """For each document with items, by number: the name of its first item and the words found."""
    first: dict[int, tuple[int, str]] = {}
    hit: set[tuple[str, int]] = set()
    for match in index.ngrams.matches((number, f"{one.text}\n{one.target}") for number, one in documents):
        for item in match.items:
            name = index.set_of(item)
            tally.found(name, index.number_of(item))
            hit.add((name, match.number))
        found = match.word, f"{index.name_of(match.items[0])}: {match.words}"
        first[match.number] = min(found, first.get(match.number, found))
    tally.contaminated.update(name for name, _ in hit)
    return {number: text for number, (_, text) in first.items()}
