"""Text-to-text pairs: lines of input, tab, target, JSON Lines with `inputs` and `targets`, or tables with such columns.

For evaluation, `targets` may be a list of right answers, and `choices` a list of answers to choose from. Training uses
the first of `targets`.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from data_pipeline.base.errors import one_line
from data_pipeline.base.stores import open_file
from data_pipeline.sources import tables
from data_pipeline.sources.format import Format
from data_pipeline.sources.jsonl import is_alone, json_object, string, strings, value_at
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, first_character, open_text, parsed_lines

_READ_AHEAD = 1 << 12  # bytes, for a look at the first ones
_FIELD = re.compile(r"\{([^{}]+)\}")  # of a template
_Pairs = Iterator[tuple[int, dict[str, Any]]]  # (ordinal, fields of a record)


class Options(TextOptions):
    """The `options` of a source of pairs. The files' first bytes tell Parquet and Arrow from lines."""

    layout: Literal["auto", "tsv", "jsonl"] = "auto"
    """How a line holds a pair. `tsv`: with a tab between. `jsonl`: as an object. `auto`: jsonl if the file's first
    character is `{`, else tsv; white space before it doesn't count."""
    inputs: str = "inputs"
    """Key or column of the input, or a template of several: `"{passage} {question}"`. A file in tsv has no names."""
    targets: str = "targets"
    """Key or column of the target: a string, or a list of right answers; the first is learnt. In Parquet and Arrow also
    an integer: the name of the label if datasets describes the column as `ClassLabel`, else the decimal number."""
    choices: str = "choices"
    """Key or column of a list of answers to choose from, for evaluation by rank; may be absent."""
    prefix: str = ""
    """Text put before every input, such as `"translate English to German: "`."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""Every pair, with the input as `text`; the ordinal is the index of the line or row.

    Counts `read` (rows, and lines that aren't blank), `empty_input` and `empty_target` (pairs that lack one, dropped).
    A line or row that isn't a pair, or isn't UTF-8, is damage. Of a table, raises what the formats of tables raise.

        prefix="English to German: ":  b"A house.\tEin Haus.\n"
          ->  Record(0, "English to German: A house.", target="Ein Haus.")
    """
    options = Options(**file.options)
    with open_file(file.path, read_ahead=_READ_AHEAD) as source:
        table = tables.format_of(source)
    for ordinal, pair in _rows(table, file, stats, options) if table else _lines(file, stats, options):
        if not pair["text"].strip():
            stats.counters.document("empty_input", pair["target"])
        elif not pair["target"].strip():
            stats.counters.document("empty_target", pair["text"])
        else:
            yield Record(ordinal, **{**pair, "text": options.prefix + pair["text"]})


def _lines(file: Input, stats: ReadStats, options: Options) -> _Pairs:
    with open_text(file, options) as stream:
        first, stream = first_character(stream)
        is_json = first == b"{" if options.layout == "auto" else options.layout == "jsonl"
        alone = partial(is_alone, stats, stream)
        parse: Callable[[str], dict[str, Any]] = partial(_of_object, options, alone) if is_json else _of_tsv
        blank = None if is_json else b" "  # a tab alone is a pair without texts
        for number, pair in parsed_lines(stream, stats, options, parse, blank):
            yield number - 1, pair


def _rows(table: type[tables.Parquet] | type[tables.Arrow], file: Input, stats: ReadStats, options: Options) -> _Pairs:
    for ordinal, row in tables.rows(table.kind, file, stats, partial(_columns, file.path, options)):
        try:
            yield ordinal, _of_row(options, row)
        except ValueError as error:
            stats.damaged(f"row {ordinal}", one_line(error))


def _columns(path: str, options: Options, schema: pa.Schema) -> dict[str, tables.ColumnPath]:
    """The columns of a table; those of the input are under their names in braces: "{question}"."""
    found, texts = {}, {"inputs": tables.TEXTS}
    for name in _FIELD.findall(options.inputs) or [options.inputs]:
        found[f"{{{name}}}"] = tables.columns(path, schema, {"inputs": name}, {"inputs"}, texts)["inputs"]
    wanted = {"targets": options.targets, "choices": options.choices}
    kinds = {"targets": tables.TEXTS_OR_LISTS, "choices": tables.LISTS_OF_STRINGS}
    return found | tables.columns(path, schema, wanted, {"targets"} | options.model_fields_set, kinds)


def _of_row(options: Options, row: dict[str, object]) -> dict[str, Any]:
    values = {field: _of_column(value) for field, value in row.items()}
    text = _filled(options.inputs, lambda name: values[f"{{{name}}}"])
    return _pair(text, values["targets"], values.get("choices") or [])


def _of_column(value: object) -> Any:
    return [tables.text_of(one) for one in value] if isinstance(value, list) else tables.text_of(value)


def _filled(template: str, text_of: Callable[[str], str]) -> str:
    """The texts of the fields in a template, or the text of the one field that `template` names.

    "{title}: {body}"  ->  "A house: It has a roof."
    """
    if not _FIELD.search(template):
        return text_of(template)
    return _FIELD.sub(lambda field: text_of(field[1]), template)


def _of_tsv(line: str) -> dict[str, Any]:
    source, *targets = line.split("\t")
    if len(targets) != 1:
        raise ValueError(f"expected input, tab, target, found {len(targets)} tabs")
    return _pair(source, targets[0], [])


def _of_object(options: Options, alone: Callable[[], bool], line: str) -> dict[str, Any]:
    pair = json_object(line)
    has_list = isinstance(value_at(pair, options.targets), list)
    keys = {} if _FIELD.search(options.inputs) else {"inputs": options.inputs}
    keys |= {} if has_list else {"targets": options.targets}
    found = strings(pair, keys, alone())
    text = _filled(options.inputs, partial(string, pair))
    targets: str | list[str] = _strings(pair, options.targets) if has_list else found["targets"]
    has_choices = value_at(pair, options.choices) is not None
    return _pair(text, targets, _strings(pair, options.choices) if has_choices else [])


def _pair(text: str, targets: str | list[str], choices: list[str]) -> dict[str, Any]:
    if isinstance(targets, str):
        return {"text": text, "target": targets, "choices": choices}
    return {"text": text, "target": next(iter(targets), ""), "targets": targets, "choices": choices}


def _strings(pair: dict[str, object], name: str) -> list[str]:
    """The strings in the list under `name`. Raises ValueError if it isn't a list of strings."""
    values = value_at(pair, name)
    if not isinstance(values, list):
        raise ValueError(f'no list under the key "{name}"')
    return [string({name: value}, name) for value in values]


class Pairs(Format):
    """Text-to-text pairs."""

    options, refuses_others, pairs = Options, True, True
    read = staticmethod(read)

    @staticmethod
    def head(file: BinaryIO, size: int) -> bytes:
        return (tables.format_of(file) or Format).head(file, size)
