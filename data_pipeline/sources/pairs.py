"""Text-to-text pairs: lines of input, tab, target, or JSON Lines with `inputs` and `targets`.

For evaluation, `targets` may be a list of right answers, and `choices` a list of answers to choose from. Training uses
the first of `targets`.
"""

from collections.abc import Iterator
from typing import BinaryIO, Literal

from data_pipeline.sources.jsonl import json_lines, string, strings
from data_pipeline.sources.record import Input, ReadStats, Record, TextOptions, next_byte, open_text, text_lines


class Options(TextOptions):
    """The `options` of a source of pairs."""

    layout: Literal["auto", "tsv", "jsonl"] = "auto"
    """How a line holds a pair. `tsv`: with a tab between. `jsonl`: as an object. `auto`: jsonl if the file's first byte
    is `{`, else tsv."""
    inputs: str = "inputs"
    """Key of the input in jsonl."""
    targets: str = "targets"
    """Key of the target in jsonl: a string, or a list of right answers, of which the first is learnt."""
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
        is_json = next_byte(stream) == b"{" if options.layout == "auto" else options.layout == "jsonl"
        pairs = _jsonl if is_json else _tsv
        for pair in pairs(stream, stats, options):
            if not pair.text.strip():
                stats.counters.document("empty_input", pair.target)
            elif not pair.target.strip():
                stats.counters.document("empty_target", pair.text)
            else:
                pair.text = options.prefix + pair.text
                yield pair


def _tsv(stream: BinaryIO, stats: ReadStats, options: Options) -> Iterator[Record]:
    for number, line in text_lines(stream, stats, options, b" "):  # a tab alone is a pair without texts
        source, *targets = line.split("\t")
        if len(targets) == 1:
            yield Record(number - 1, source, target=targets[0])
        else:
            stats.damaged(f"line {number}", f"expected input, tab, target, found {len(targets)} tabs")


def _jsonl(stream: BinaryIO, stats: ReadStats, options: Options) -> Iterator[Record]:
    for number, pair in json_lines(stream, stats, options):
        try:
            several = isinstance(pair.get(options.targets), list)
            targets = _strings(pair, options.targets) if several else []
            keys = {"inputs": options.inputs} | ({} if several else {"targets": options.targets})
            found = strings(pair, keys)
            source, target = found["inputs"], next(iter(targets), "") if several else found["targets"]
            choices = _strings(pair, options.choices) if options.choices in pair else []
        except ValueError as error:
            stats.damaged(f"line {number}", str(error))
            continue
        yield Record(number - 1, source, target=target, targets=targets, choices=choices)


def _strings(pair: dict[str, object], name: str) -> list[str]:
    """The strings in the list under `name`. Raises ValueError if it isn't a list of strings."""
    values = pair[name]
    if not isinstance(values, list):
        raise ValueError(f'no list under the key "{name}"')
    return [string({name: value}, name) for value in values]
