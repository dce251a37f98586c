"""Text-to-text pairs: lines of input, tab, target, or JSON Lines with `inputs` and `targets`.

For evaluation, `targets` may be a list of right answers, and `choices` a list of answers to choose from. Training uses
the first of `targets`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from data_pipeline.sources.format import Format
from data_pipeline.sources.jsonl import is_alone, json_object, string, strings
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, first_character, open_text, parsed_lines


class Options(TextOptions):
    """The `options` of a source of pairs."""

    layout: Literal["auto", "tsv", "jsonl"] = "auto"
    """How a line holds a pair. `tsv`: with a tab between. `jsonl`: as an object. `auto`: jsonl if the file's first
    character is `{`, else tsv; white space before it doesn't count."""
    inputs: str = "inputs"
    """Key of the input in jsonl."""
    targets: str = "targets"
    """Key of the target in jsonl: a string, or a list of right answers; the first is learnt."""
    choices: str = "choices"
    """Key of a list of answers to choose from in jsonl, for evaluation by rank; may be absent."""
    prefix: str = ""
    """Text put before every input, such as `"translate English to German: "`."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""Every pair, with the input as `text`; the ordinal is the line's index.

    Counts `read` (lines that aren't blank), `empty_input` and `empty_target` (pairs that lack one, dropped). A line
    that isn't a pair, or isn't UTF-8, is damage.

        prefix="English to German: ":  b"A house.\tEin Haus.\n"
          ->  Record(0, "English to German: A house.", target="Ein Haus.")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        first, stream = first_character(stream)
        is_json = first == b"{" if options.layout == "auto" else options.layout == "jsonl"
        alone = partial(is_alone, stats, stream)
        parse: Callable[[str], dict[str, Any]] = partial(_of_object, options, alone) if is_json else _of_tsv
        blank = None if is_json else b" "  # a tab alone is a pair without texts
        for number, pair in parsed_lines(stream, stats, options, parse, blank):
            if not pair["text"].strip():
                stats.counters.document("empty_input", pair["target"])
            elif not pair["target"].strip():
                stats.counters.document("empty_target", pair["text"])
            else:
                yield Record(number - 1, **{**pair, "text": options.prefix + pair["text"]})


def _of_tsv(line: str) -> dict[str, Any]:
    source, *targets = line.split("\t")
    if len(targets) != 1:
        raise ValueError(f"expected input, tab, target, found {len(targets)} tabs")
    return {"text": source, "target": targets[0]}


def _of_object(options: Options, alone: Callable[[], bool], line: str) -> dict[str, Any]:
    pair = json_object(line)
    if isinstance(pair.get(options.targets), list):
        targets = _strings(pair, options.targets)
        found = strings(pair, {"inputs": options.inputs}, alone()) | {"targets": next(iter(targets), "")}
    else:
        targets, found = [], strings(pair, {"inputs": options.inputs, "targets": options.targets}, alone())
    choices = _strings(pair, options.choices) if options.choices in pair else []
    return {"text": found["inputs"], "target": found["targets"], "targets": targets, "choices": choices}


def _strings(pair: dict[str, object], name: str) -> list[str]:
    """The strings in the list under `name`. Raises ValueError if it isn't a list of strings."""
    values = pair[name]
    if not isinstance(values, list):
        raise ValueError(f'no list under the key "{name}"')
    return [string({name: value}, name) for value in values]


class Pairs(Format):
    """Text-to-text pairs."""

    options, refuses_others, pairs = Options, True, True
    read = staticmethod(read)
