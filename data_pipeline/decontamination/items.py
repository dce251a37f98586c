"""Settings of decontamination, and the items of evaluation sets: JSON Lines, tab-separated columns, lines of text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.foundation.config_file import Locations, Section
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.foundation.formatting import first_few
from data_pipeline.foundation.paths import opening
from data_pipeline.sources.decompress import open_stream
from data_pipeline.sources.formats import refuse_other_format
from data_pipeline.sources.jsonl import json_lines
from data_pipeline.sources.record import Input, ReadStats, RecordOptions, decode, numbered_lines


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
    ngram: int = Field(13, ge=2)
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


_SHOWN = 8  # names in a message


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
    with open_stream(path) as stream:
        for number, record in json_lines(stream, _Strict(), RecordOptions()):
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
    with open_stream(path) as stream:
        for number, line in numbered_lines(stream, options.max_record_bytes):
            if line is None or line.strip():
                try:
                    text = decode(line.removeprefix(b"\xef\xbb\xbf") if line and number == 1 else line, options)
                except ValueError as error:  # its advice is for sources
                    raise DamagedInput(path, f"line {number}", str(error).partition(";")[0]) from None
                yield number, text
