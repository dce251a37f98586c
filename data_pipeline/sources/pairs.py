"""Text-to-text pairs: lines of input, tab, target, or JSON Lines with `inputs` and `targets`."""

from collections.abc import Iterator
from typing import Literal

from data_pipeline.sources.compression.stream import open_stream
from data_pipeline.sources.jsonl import begins_object, json_lines, string
from data_pipeline.sources.lines import RecordOptions, decode, numbered_lines, too_long
from data_pipeline.sources.record import Input, Intake, Record


class Options(RecordOptions):
    """The `options` of a source of pairs."""

    layout: Literal["auto", "tsv", "jsonl"] = "auto"
    """How a line holds a pair. `tsv`: with a tab between. `jsonl`: as an object. `auto`: jsonl if the file's first byte
    is `{`, else tsv."""
    inputs: str = "inputs"
    """Key of the input in jsonl."""
    targets: str = "targets"
    """Key of the target in jsonl."""
    prefix: str = ""
    """Text put before every input, such as `"translate English to German: "`."""


def read(file: Input, intake: Intake) -> Iterator[Record]:
    r"""Every pair, with the input as `text`; the ordinal is the line's index.

    Counts `read` (lines that aren't blank), `empty` (no input or no target, dropped) and `undecodable` (bytes that
    aren't UTF-8 become U+FFFD). A line that isn't a pair is noted as damage and skipped.

        prefix="English to German: ":  b"A house.\tEin Haus.\n"
          ->  Record(0, "English to German: A house.", target="Ein Haus.")
    """
    options = Options(**file.options)
    is_json = begins_object(file) if options.layout == "auto" else options.layout == "jsonl"
    pairs = _jsonl if is_json else _tsv
    for ordinal, source, target in pairs(file, intake, options):
        if source.strip() and target.strip():
            yield Record(ordinal, options.prefix + source, target=target)
        else:
            intake.counters["empty"] += 1


def _tsv(file: Input, intake: Intake, options: Options) -> Iterator[tuple[int, str, str]]:
    with open_stream(file.path) as stream:
        for number, line in numbered_lines(stream, options.max_record_bytes):
            if line is not None and not line.strip(b" "):
                continue
            intake.counters["read"] += 1
            if line is None:
                intake.damaged(f"line {number}", too_long(options))
            elif b"\0" in line:
                intake.damaged(f"line {number}", "holds NUL bytes: expected UTF-8 text")
            elif line.count(b"\t") != 1:
                intake.damaged(f"line {number}", f"expected input, tab, target, found {line.count(9)} tabs")
            else:
                source, _, target = decode(line, intake).partition("\t")
                yield number - 1, source, target


def _jsonl(file: Input, intake: Intake, options: Options) -> Iterator[tuple[int, str, str]]:
    for number, pair in json_lines(file, intake, options):
        try:
            yield number - 1, string(pair, options.inputs), string(pair, options.targets)
        except ValueError as error:
            intake.damaged(f"line {number}", str(error))
