"""Prints the page docs/reference/settings.md: every key of corpus and run files, from their classes.

python -m docs.site.settings_reference > docs/reference/settings.md
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from data_pipeline.base.config_file import Section, allowed_values, meaning, sections_in
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.objectives.registry import TrainingObjective
from data_pipeline.sources.formats import FORMATS
from pretrain.config import RunConfig

_INTRODUCTION = """\
# Settings

Every key of corpus files and of run files. `python -m docs.site.settings_reference` prints this page from the code,
where each key's meaning stands below its field.

Keys are written as on the command line, where `checkpoint.every_steps=500` sets one; a number is the index in a list,
from 0. A key without a default is **required**; a section without one has the defaults of its keys. `null` empties a
list that is empty by default and that an extended file fills.

At the top of a file, `extends: [other.yaml]` names files to start from, by paths relative to it or, if they ship with
the package, as `configs:models/t5-v1.1-base.yaml`. They are merged in order, the file itself last. `${samples:}` stands
for the directory of the sample texts.
"""


class Row(NamedTuple):
    """A row of a table, in Markdown."""

    key: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Part:
    """A heading of the page with its text and its table."""

    level: int
    heading: str
    text: str
    rows: list[Row]

    def __str__(self) -> str:
        return "\n\n".join(
            [f"{'#' * self.level} {self.heading}", self.text, *([_table(self.rows)] if self.rows else [])]
        )


def page() -> str:
    """The whole page, in Markdown."""
    parts = list(_parts())
    return "\n\n".join([_INTRODUCTION + "\n" + _contents(parts), *map(str, parts)]) + "\n"


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading: "`name: t5`" -> "name-t5"."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _link(heading: str, text: str) -> str:
    return f"[{text}](#{anchor(heading)})"


def _contents(parts: list[Part]) -> str:
    lines: list[str] = []
    for part in parts:
        if part.level == 2:
            lines.append(f"- {_link(part.heading, part.heading)}: ")
        elif part.level == 3:
            comma = "" if lines[-1].endswith(": ") else ", "
            lines[-1] += comma + _link(part.heading, part.heading.split(": ")[-1])
    return "\n".join(lines)


def _parts() -> Iterator[Part]:
    yield from file_parts("Corpus files", CorpusConfig)
    yield from _kinds(
        2,
        "Objectives",
        "What a model learns from a row: `rows.objective` of a corpus file, or `data.objective` of a run file. "
        "[How they compare](../explanation/objectives.md).",
        "objective",
        FieldInfo.from_annotation(TrainingObjective),
    )
    yield from file_parts("Run files", RunConfig)


def file_parts(title: str, schema: type[Section]) -> Iterator[Part]:
    """The parts of one kind of file: its top level, then each of its sections."""
    classes = {name: sections_in(field) for name, field in schema.model_fields.items()}
    sections = [name for name, found in classes.items() if found]
    yield Part(2, title, _summary(schema), _rows(schema, "", frozenset(sections)))
    for name in sections:
        field = schema.model_fields[name]
        if _tagged(field):
            key = f"{name}.{_item(field)}".rstrip(".")
            yield from _kinds(3, name, meaning(schema, name), key, _of_one(field))
        else:
            (section,) = classes[name]
            rows = _rows(section, f"{name}.{_item(field)}", frozenset(sections) | {"options"})
            yield Part(3, name, _summary(section), rows)
        if name == "sources":
            yield Part(3, "options", "By the format of the source.", [])
            for format_, known in FORMATS.items():
                options = known.options
                rows = _rows(options, "sources.0.options.", frozenset())
                yield Part(4, f"format: {format_}", _summary(options) if rows else "No options.", rows)


def _kinds(level: int, heading: str, text: str, key: str, field: FieldInfo) -> Iterator[Part]:
    """The parts of a section of several kinds: the keys that all kinds have, then each kind's own keys."""
    kinds = {kind: section for section in sections_in(field) for _, kind in _tags(section)}
    ((tag, _),) = _tags(next(iter(kinds.values())))
    tables = {name: _rows(section, f"{key}.", frozenset()) for name, section in kinds.items()}
    links = ", ".join(_link(f"{tag}: {name}", f"`{name}`") for name in kinds)
    first, *others = tables.values()
    common = [row for row in first if all(row in other for other in others)]
    yield Part(level, heading, f"{text}\n\n`{key}.{tag}` ({_default_kind(field)}) is one of {links}.", common)
    for name, section in kinds.items():
        rows = [row for row in tables[name] if row not in common]
        yield Part(level + 1, f"{tag}: {name}", f"{_summary(section)}{_origin(section)}", rows)


def _rows(section: type[Section], prefix: str, linked: frozenset[str]) -> list[Row]:
    """The keys of `section` and of the sections inside it, except those in `linked`, which have a table elsewhere."""
    schema, found = section.model_json_schema(), []
    for key, field in section.model_fields.items():
        classes = sections_in(field)
        if _is_tag(field):
            continue
        elsewhere = key in linked or _tagged(field)
        values = allowed_values(schema["properties"][key], lambda value: f"`{value}`")
        if classes or key in linked:
            word = "sections" if _item(field) else "section"
            table = _link(key if key in linked else "objectives", word) if elsewhere else word
            values = values.replace("keys and values", table)
        found.append(Row(f"{prefix}{key}", values, _default(section, key), meaning(section, key)))
        if classes and not elsewhere:
            found += _rows(classes[0], f"{prefix}{key}.{_item(field)}", linked)
    return found


def _of_one(field: FieldInfo) -> FieldInfo:
    """A section of several kinds as a field; of a list of such sections, an item."""
    return FieldInfo.from_annotation(get_args(field.annotation)[0]) if _item(field) else field


def _item(field: FieldInfo) -> str:
    """The path from a field that is a list to its first item."""
    return "0." if get_origin(field.annotation) in (list, tuple) else ""


def _default(section: type[Section], key: str) -> str:
    """The value of a key that is left out. Other keys may decide it, as `profile` does in cleaning."""
    field = section.model_fields[key]
    if field.is_required():
        return "**required**"
    value = getattr(_with_defaults(section), key, field.get_default(call_default_factory=True))
    if isinstance(value, Section):
        return "".join(f"`{kind}`" for _, kind in _tags(type(value)))
    return _written(value)


@cache
def _with_defaults(section: type[Section]) -> Section | None:
    """`section` without any key; None if it has required keys."""
    try:
        return section()
    except ValidationError:
        return None


def _written(value: Any) -> str:
    """A value as YAML; "…" for a long value, which the key's meaning describes."""
    if value == "":
        return '`""`'
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    plain = TypeAdapter(Any).dump_python(value, mode="json", exclude_unset=True)
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`" if len(text) <= 60 else "…"


def _default_kind(field: FieldInfo) -> str:
    """The kind of a section that names no kind."""
    try:
        chosen = TypeAdapter(Annotated[field.annotation, field]).validate_python({})
    except ValidationError as error:
        problem = error.errors()[0]
        return "**required**" if problem["type"].startswith("union_tag") else f"default: `{problem['loc'][0]}`"
    return "".join(f"default: `{kind}`" for _, kind in _tags(type(chosen)))


def _tags(section: type[Section]) -> list[tuple[str, str]]:
    """(key, kind) of a section of several kinds; nothing for other sections."""
    return [(key, get_args(field.annotation)[0]) for key, field in section.model_fields.items() if _is_tag(field)]


def _is_tag(field: FieldInfo) -> bool:
    """True if the field names the kind of its section: it has one value, and a default."""
    one_value = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return one_value and field.default is not PydanticUndefined


def _tagged(field: FieldInfo) -> bool:
    """True if there are several kinds of this section."""
    return len(sections_in(field)) > 1


def _summary(section: type[Section]) -> str:
    """The first paragraph of the class's docstring."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _origin(section: type[Section]) -> str:
    """The package of a kind that another package offers."""
    package = section.__module__.split(".")[0]
    return "" if package in ("data_pipeline", "pretrain") else f" Offered by the package `{package}`."


def _table(rows: list[Row]) -> str:
    """A table whose columns, except the last, are aligned in a terminal, too."""
    lines = [["key", "values", "default", "meaning"], *([f"`{row.key}`", *row[1:]] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    texts = [[*map(str.ljust, line[:3], widths), line[3]] for line in lines]
    texts.insert(1, ["-" * width for width in (*widths, 7)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


if __name__ == "__main__":
    print(page(), end="")
