"""JSON Lines with configurable keys, and C4 as published (`c4-train.00000-of-01024.json.gz`)."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources.format import Format
from data_pipeline.sources.record import (
    FieldNames,
    IdsOption,
    Input,
    ReadStats,
    Record,
    RecordOptions,
    TextOptions,
    next_bytes,
    open_text,
    parsed_lines,
    record_of,
    text_of_ids,
)

_PLAIN = re.compile(r"[A-Za-z_][\w.]*")  # in YAML
# How deep into nested objects names are suggested from. `json` reads deeper objects than Python can recurse into.
_DEEPEST = 20


class Options(FieldNames, IdsOption, TextOptions):
    """Names of the keys. "meta.url" is the key `url` of the object under `meta`; "" leaves the field empty."""


def read(file: Input, stats: ReadStats) -> Iterator[Record]:
    r"""A record for every object with a text; the ordinal is the line's index. All other keys may be absent or null.

    Counts `read` (lines that aren't blank) and `empty` (blank texts, dropped). A line that isn't such an object is
    damage.

        {"text":"Hello.","url":"https://a.org/"}\n  ->  Record(0, "Hello.", "https://a.org/")
    """
    options = Options(**file.options)
    with open_text(file, options) as stream:
        yield from records(stream, stats, options)


def names(path: str) -> list[str]:
    """The names of the strings in the first 100 objects. Raises DamagedInput if one object has the records of a
    file."""
    some = _first_objects(path)
    if len(some) == 1 and (other := not_a_record(some[0])):
        raise DamagedInput(path, "line 1", other)
    return [*dict.fromkeys(name for one in some for name, _ in lengths_of_strings(one))]


def names_of_ids(path: str) -> list[str]:
    """The keys of the lists of integers in the first 100 objects."""
    some = _first_objects(path)
    return [*dict.fromkeys(key for one in some for key, value in one.items() if _is_ids(value))]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _first_objects(path: str) -> list[dict[str, object]]:
    options = Options()
    with open_text(Input(path), options) as stream:
        return [one for _, one in itertools.islice(parsed_lines(stream, ReadStats(), options, json_object), 100)]


def records(stream: BinaryIO, stats: ReadStats, options: Options) -> Iterator[Record]:
    """The records of the objects in a stream."""
    names = {field: name for field in FieldNames.model_fields if (name := getattr(options, field)) and field != "text"}

    def parse(line: str) -> dict[str, str]:
        found = json_object(line)
        if options.ids:
            row = {"text": ids_of(found, options.ids)}
        else:
            row = strings(found, {"text": options.text}, is_alone(stats, stream))
        return row | {field: string(found, name, required=False) for field, name in names.items()}

    for number, row in parsed_lines(stream, stats, options, parse):
        if record := record_of(number - 1, row, stats):
            yield record


def is_alone(stats: ReadStats, stream: BinaryIO) -> bool:
    """Whether the line that was just read from `stream` has the only record of the file."""
    return stats.counters.read == 1 and not next_bytes(stream).strip()


def json_object(line: str) -> dict[str, object]:
    """The JSON object in a line. Raises ValueError for anything else."""
    try:
        record = json.loads(line.removeprefix("\ufeff"))  # joined files have byte order marks inside
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found a JSON {type(record).__name__}")
    return record


def strings(record: dict[str, object], keys: dict[str, str], alone: bool) -> dict[str, str]:
    """The strings of `record` by option; `keys` has the key of each option: {"inputs": "question"}. `alone`: whether
    the record may be all of its file.

    Raises ValueError if one doesn't exist. The message says what to set or do: it names the keys of the longest strings
    or, for an object that holds other records or a chat, the command that makes lines or one text of these.
    """
    try:
        return {option: string(record, key) for option, key in keys.items()}
    except ValueError as error:
        if alone and (other := not_a_record(record)):
            raise ValueError(f"{error}; it looks like {other}") from None
        if "text" in keys and (listed := _texts_in_list(record)):
            raise ValueError(f"{error}; {listed}") from None
        lengths = dict(lengths_of_strings(record))
        longest = sorted(lengths, key=lambda path: -lengths[path])[: len(keys)]
        if all(_has(record, key) for key in keys.values()) or len(longest) < len(keys):
            raise
        found = zip(keys, [path for path in lengths if path in longest], strict=True)
        advice = (f"{option}: {path if _PLAIN.fullmatch(path) else json.dumps(path)}" for option, path in found)
        raise ValueError(f"{error}; for other keys set options: {{{', '.join(advice)}}}") from None


def not_a_record(record: dict[str, object]) -> str:
    """For an object that holds all records of a file: what it is, and how to make lines of it; else ""."""
    own = max((len(value) for value in record.values() if isinstance(value, str)), default=0)
    for key, value in record.items():
        if isinstance(value, dict) and (key == "0" or "0" in value):
            return "one JSON object, a table of pandas: write it by to_json(orient='records', lines=True)"
        rows = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
        if rows and own < sum(length for one in rows for _, length in lengths_of_strings(one)):
            lines = f"make each of them a line by jq -c '{_jq(key)}[]'"
            return f"one JSON object with its records under {key!r}: {lines}"
    return ""


def _texts_in_list(record: dict[str, object]) -> str:
    """For a record whose texts are in a list of objects, as a chat's are: where, and how to join them; else ""."""
    own = max((length for _, length in lengths_of_strings(record)), default=0)
    for key, value in record.items():
        rows = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
        lengths = Counter[str]()
        for row in rows:
            lengths.update(dict(lengths_of_strings(row)))
        if lengths and lengths.total() > own:
            text, _ = max(lengths.items(), key=lambda one: one[1])
            path = f"{_jq(key)}[]{''.join(map(_jq, text.split('.')))}"
            how = f"""to make one text of them: jq -c '{{text: ([{path}] | join("\\n"))}}'"""
            return f"its texts are in a list of objects under {key!r}, as in a chat; {how}"
    return ""


def _jq(key: str) -> str:
    """The path of a key in jq's language."""
    return f".{key}" if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key) else f".{json.dumps(key)}"


def _has(record: dict[str, object], key: str) -> bool:
    """Whether `record` has the `key`, or the name before its dot, with a value that isn't an object."""
    return key.partition(".")[0] in record and not isinstance(record.get(key), dict)


def lengths_of_strings(record: dict[str, object], before: str = "") -> Iterator[tuple[str, int]]:
    """The length of each string of `record`, by the name under which `string` finds it; not of very deep ones."""
    for key, value in record.items():
        if isinstance(value, str) and not (before and "." in key):
            yield f"{before}{key}", len(value)
        elif isinstance(value, dict) and before.count(".") < _DEEPEST:
            yield from lengths_of_strings(value, f"{before}{key}.")


def string(record: dict[str, object], name: str, required: bool = True) -> str:
    """The string under `name`, or "" if it is absent and not `required`. Raises ValueError otherwise.

    {"meta": {"url": "https://a.org/"}}, "meta.url"  ->  "https://a.org/"
    """
    value = value_at(record, name)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise ValueError(f'no string under the key "{name}"')
    value.encode()  # raises for a lone surrogate ("\ud800"), which is valid JSON but no text
    return value


def ids_of(record: dict[str, object], name: str) -> str:
    """The list of integers under `name`, as text. Raises ValueError if there is none."""
    if (value := value_at(record, name)) is None:
        raise ValueError(f'no list of integers under the key "{name}"')
    return text_of_ids(value)


def value_at(record: dict[str, object], name: str) -> Any:
    """The value under `name`; None if it is absent."""
    value: Any = record
    for key in [name] if name in record else name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:\.\d*[1-9])?)(?:\.?0+)?(Z|[+-]\d\d:?\d\d)?")


def read_c4(file: Input, stats: ReadStats) -> Iterator[Record]:
    """Text, url and timestamp of every line of C4; the ordinal is the line's index.

    Copies of C4 differ: some have timestamps without "T" and "Z", `date` instead of `timestamp`, or only a text. All
    are read, and the timestamp becomes ISO 8601, with its offset if it has one. Counts `read` (lines that aren't blank)
    and `empty` (blank texts, dropped). A line that isn't such an object is damage.

        {"text":"Hello.","timestamp":"2019-04-25 12:57:54","url":"https://a.org/"}
          ->  Record(0, "Hello.", "https://a.org/", timestamp="2019-04-25T12:57:54Z")
    """
    options = RecordOptions(**file.options)
    with open_text(file, options) as stream:
        for number, row in parsed_lines(stream, stats, options, _c4_row):
            if record := record_of(number - 1, row, stats):
                yield record


def _c4_row(line: str) -> dict[str, str]:
    found = json_object(line)
    text, url = string(found, "text"), string(found, "url", required=False)
    timestamp = string(found, "timestamp", required=False) or string(found, "date", required=False)
    if time := _TIMESTAMP.fullmatch(timestamp):
        timestamp = f"{time[1]}T{time[2]}{time[3] or 'Z'}"
    return {"text": text, "url": url, "timestamp": timestamp}


class JsonLines(Format):
    """A JSON object a line."""

    options, refuses_others = Options, True
    read = staticmethod(read)


class C4(Format):
    """C4 as it is published, in JSON Lines."""

    options, refuses_others = RecordOptions, True
    read = staticmethod(read_c4)
