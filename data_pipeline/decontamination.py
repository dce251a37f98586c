"""Decontamination: its settings, the items of evaluation sets, and documents that contain one by the words they share.

Items are read from JSON Lines, tab-separated columns or lines of text.

An item is in a document if one of its texts is: if any 13 successive words of it are also successive words of the
document, as for GPT-3 (Brown et al. 2020, appendix C). A text of 8 to 12 words must be there as a whole: GPT-3's n goes
from 13 down to 8 too, by the lengths of a set's items. Words consist of letters with their marks and of digits, in
lower case and NFKC. Where a script has no spaces, as many letters count as 13 words have on average (`text/words.py`).
GPT-3's authors cut out the match and its surroundings; here, the whole document is dropped, as for Dolma (Soldaini et
al. 2024).

Words are hashed 100 kB at a time. A table with a byte for each range of hashes, small enough for a core's cache, rules
out nearly every run of 13 words, and of the first 8 of a shorter text. The rest are looked up by hashes of 128 bits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from data_pipeline.foundation.config_file import Locations, Section
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.foundation.formatting import first_few
from data_pipeline.foundation.paths import opening
from data_pipeline.sources.formats import refuse_other_format
from data_pipeline.sources.jsonl import json_lines
from data_pipeline.sources.record import Input, ReadStats, RecordOptions, decode, numbered_lines, open_text
from data_pipeline.text.words import LONGEST_NGRAM, Words, batches, normalised

_SHOWN = 8  # names in a message
_SLOTS_PER_NGRAM, _FEWEST_BITS, _MOST_BITS = 32, 16, 25  # of the table


class EvaluationSet(Section):
    """An evaluation set, whose items must not be in the corpus."""

    name: str = Field(min_length=1)
    """The set's name in the report."""
    path: Locations
    """Its files, plain or compressed: a path, a glob, or a list of them, local or as fsspec URLs."""
    format: Literal["jsonl", "tsv", "text"] = "jsonl"
    """How a file holds items. `jsonl`: an object a line. `tsv`: tab-separated columns. `text`: the line itself."""
    fields: list[str | int] = []
    """Where an item's texts are; each is looked for by itself. jsonl: keys (`choices.text`: the key `text` of the
    object, or of each object of the list, under `choices`). tsv: names in the first line or, if there is no such line,
    numbers of columns from 1. text: none."""

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
    """Drops each document that contains an item of an evaluation set: a run of its words, whatever their case and the
    punctuation between them. In scripts without spaces, as many letters count as the words have on average."""

    sets: list[EvaluationSet] = []
    """The evaluation sets. [] turns decontamination off."""
    ngram: int = Field(13, ge=2, le=LONGEST_NGRAM)
    """How many successive words of an item must be in a document. GPT-3: 13."""
    shortest: int = Field(8, ge=1)
    """Shorter texts of items aren't looked for; those of fewer words than `ngram` must be in a document as a whole.
    GPT-3: 8."""

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
    """Statistics that refuse damage: what can't be read of an evaluation set can't be looked for."""

    def damaged_between(self, position: str, reason: str) -> None:
        raise DamagedInput("", position, reason)


def read_items(path: str, evaluation_set: EvaluationSet) -> Iterator[Item]:
    """The items of one file of a set, in order; blank lines are skipped.

    Raises UserError, which names the file, the line and the set, if the file has another format or is damaged, and for
    an item without one of the fields.
    """
    readers = {
        "jsonl": _jsonl_items,
        "tsv": _tsv_items,
        "text": lambda path, _: (Item(number, [line]) for number, line in _lines(path)),
    }
    try:
        with opening(path):
            refuse_other_format(Input(path), evaluation_set.format, ReadStats())
            yield from readers[evaluation_set.format](path, evaluation_set)
    except DamagedInput as error:
        context = f"format {evaluation_set.format} of evaluation set {evaluation_set.name!r}"
        raise UserError(f"{path.removeprefix('file://')}: {error.position}: {error.reason} ({context})") from None


def _jsonl_items(path: str, evaluation_set: EvaluationSet) -> Iterator[Item]:
    options = RecordOptions()
    with open_text(Input(path), options) as stream:
        for number, record in json_lines(stream, _Strict(), options):
            texts: list[str] = []
            for field in map(str, evaluation_set.fields):
                try:
                    texts += _texts(record, [field] if field in record else field.split("."))
                except LookupError:
                    raise DamagedInput(
                        path, f"line {number}", f'no field "{field}"; it has {first_few(record, _SHOWN)}'
                    ) from None
                except TypeError as error:
                    reason = f'field "{field}": expected text, found {error}'
                    raise DamagedInput(path, f"line {number}", reason) from None
            yield Item(number, texts)


def _texts(value: Any, keys: list[str]) -> list[str]:
    """The texts under `keys` in a JSON value; null has none. Raises LookupError, or TypeError with the type found.

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
            for field in evaluation_set.fields:
                if field not in cells:
                    raise DamagedInput(
                        path, f"line {number}", f'no column "{field}"; it has {first_few(cells, _SHOWN)}'
                    )
            columns = [cells.index(str(field)) for field in evaluation_set.fields]
        elif max(columns) >= len(cells):
            raise DamagedInput(path, f"line {number}", f"no column {max(columns) + 1}; it has {len(cells)}")
        else:
            yield Item(number, [cells[column] for column in columns])


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Every line that isn't blank, with its number."""
    options = RecordOptions()
    with open_text(Input(path), options) as stream:
        for number, line in numbered_lines(stream, options.max_record_bytes):
            if line is None or line.strip():
                try:
                    yield number, decode(line, options)
                except ValueError as error:
                    raise DamagedInput(path, f"line {number}", str(error)) from None


@dataclass(frozen=True)
class Match:
    """A run of words of text `number`, from the word `word`, that is in the items `items`: the words, as the text has
    them."""

    number: int
    word: int
    items: list[int]
    words: str


class Ngrams:
    """The n-grams of numbered items: all runs of 13 words of long texts, and shorter texts as a whole.

    `first`, `second`, `items` (n,): the two hashes of each n-gram, sorted, and an item that has it. Only those whose
    head, their first words, is likely to be in a text are looked up. `heads`: for each number of words of a head, the
    hashes of the heads; `more`: for each, how many words n-grams have after their heads.
    """

    def __init__(
        self,
        first: np.ndarray,
        second: np.ndarray,
        items: np.ndarray,
        heads: dict[int, np.ndarray],
        more: dict[int, list[int]],
    ):
        self._first, self._second, self._items, self._heads, self._more = first, second, items, heads, more
        self._likely = {head: _Likely(hashes) for head, hashes in heads.items()}

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
        distinct = {head: np.unique(np.concatenate(heads[head])) for head in sorted(heads)}
        return cls(first, second, items.astype(np.uint32), distinct, {head: sorted(more[head]) for head in distinct})

    @property
    def known(self) -> np.ndarray:
        """The items that can be found, ascending: those with a text that is long enough."""
        return np.unique(self._items)

    def matches(self, texts: Iterable[tuple[int, str]]) -> Iterator[Match]:
        """Every run of words of numbered texts that is an n-gram of items."""
        for words in batches(texts, normalised(), max(self._heads, default=1)):
            for head, more in self._more.items():
                runs = self._likely[head].among(words.runs(head, 0))
                stops = words.stops(head)[runs]
                for number in more:
                    inside = words.within(runs, stops + number)
                    yield from self._matches(words, runs[inside], stops[inside] + number)

    def _matches(self, words: Words, runs: np.ndarray, stops: np.ndarray) -> Iterator[Match]:
        """Of the runs from the words `runs` to those before `stops`, those that are n-grams of items."""
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

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All that `from_arrays` needs."""
        more = [(head, number) for head, numbers in self._more.items() for number in numbers]
        arrays = {"first": self._first, "second": self._second, "items": self._items}
        arrays["more"] = np.array(more, dtype=np.int64).reshape(-1, 2)
        return arrays | {f"heads.{head}": hashes for head, hashes in self._heads.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Ngrams":
        more: dict[int, list[int]] = {}
        for head, number in arrays["more"].tolist():
            more.setdefault(head, []).append(number)
        heads = {head: arrays[f"heads.{head}"] for head in more}
        return cls(arrays["first"], arrays["second"], arrays["items"], heads, more)


class _Likely:
    """A table with a byte for each range of hashes: whether any of `hashes` is in it."""

    def __init__(self, hashes: np.ndarray):
        bits = min(_MOST_BITS, max(_FEWEST_BITS, (_SLOTS_PER_NGRAM * len(hashes)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=bool)
        self._table[self._slots(hashes)] = True

    def among(self, hashes: np.ndarray) -> np.ndarray:
        """(k,): the numbers of those of `hashes` (n,) that are in the table; few of the others are returned too."""
        return np.flatnonzero(self._table.take(self._slots(hashes), mode="clip"))

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> self._shift).view(np.int64)
