"""docs/reference/settings.md: every key of corpus, run, experiment and ladder files, from their settings."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation import key_meanings
from data_pipeline.foundation.config_file import Section
from data_pipeline.foundation.errors import UserError
from data_pipeline.objectives import AnyObjective
from data_pipeline.sources import OPTIONS
from pretrain.config import RunConfig, deepspeed_keys
from pretrain.tools.experiment.experiment_file import ExperimentFile
from pretrain.tools.ladder.ladder_file import LadderFile

_INTRODUCTION = """\
# Reference

Every key of corpus files, of run files and of the files of experiments and ladders. `pretrain reference` prints this
page from the code, where each key's meaning stands below its field.

Keys are written as on the command line, where `checkpoint.every_steps=500` sets one; a number is the place in a list,
from 0. A key without a default is **required**; a section without one has the defaults of its keys.

At the top of a file, `extends: [other.yaml]` names files to start from, by paths relative to it or, if they ship with
the package, as `configs:models/t5-v1.1-base.yaml`. They are merged in order, the file itself last. `${samples:}` stands
for the directory of the sample texts.
"""

Kinds = dict[str, type[Section]]


class Row(NamedTuple):
    """A key's line in a table; all cells are Markdown."""

    key: str
    values: str
    default: str
    meaning: str


def page() -> str:
    """The whole page, in Markdown."""
    corpus, run = list(_file("Corpus files", CorpusConfig)), list(_file("Run files", RunConfig))
    objectives = [
        "## Objectives",
        "What a model learns from a row: `rows.objective` of a corpus file, or `data.objective` of a run file. "
        "[How they compare](../explanation/objectives.md).",
        *_kinds("objective", AnyObjective, "###"),
    ]
    experiment = list(_file("Experiment files", ExperimentFile))
    ladder = list(_file("Ladder files", LadderFile))
    blocks = [*corpus, *objectives, *run, *experiment, *ladder]
    return "\n\n".join([_INTRODUCTION + "\n" + _contents(blocks), *blocks]) + "\n"


def of_key(key: str) -> str:
    """The part of the page about `key` and the keys below it, for a terminal; places in lists may be left out.

    Raises UserError for a key that no file has, with the nearest ones.
    """
    wanted, headings, found, known = _plain(key), [""] * 3, [], []
    for line in page().splitlines():
        if heading := re.match(r"(##+) (.*)", line):
            level = len(heading[1]) - 2
            headings[level:] = [heading[2].replace("`", ""), *[""] * (2 - level)]
        elif (cells := line.strip("| ").split(" | ")) and (name := re.fullmatch(r"`([^` ]+)` *", cells[0])):
            known.append(name[1])
            if f"{_plain(name[1])}.".startswith(f"{wanted}."):
                found.append(_shown(name[1], ", ".join(filter(None, headings)), [cell.strip() for cell in cells[1:]]))
    if not found:
        near = get_close_matches(key, dict.fromkeys(known), 3, 0.5)
        advice = f"the nearest are {', '.join(near)}" if near else "pretrain reference shows all"
        raise UserError(f"{key}: no such key; {advice}")
    return "\n".join(found)


def _plain(key: str) -> str:
    """`key` without the places in lists: "sources.0.path" -> "sources.path"."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _shown(key: str, where: str, cells: list[str]) -> str:
    """A row of a table as lines; DeepSpeed's tables have no column of values."""
    *values, default, meaning = (re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).replace("`", "") for cell in cells)
    lines = [f"{key} ({where})", f"  {meaning}", *(f"  values: {one}" for one in values)]
    return "\n".join([*lines, *([f"  default: {default.replace('**', '')}"] if default else []), ""])


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading: "`name: t5`" -> "name-t5"."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _contents(blocks: list[str]) -> str:
    lines: list[str] = []
    for block in blocks:
        if block.startswith("## "):
            lines.append(f"- {_link(block[3:], block[3:])}: ")
        elif block.startswith("### "):
            lines[-1] += ("" if lines[-1].endswith(": ") else ", ") + _link(block[4:], block[4:].split(": ")[-1])
    return "\n".join(lines)


def _link(heading: str, text: str) -> str:
    return f"[{text}](#{anchor(heading)})"


def _file(title: str, schema: type[Section]) -> Iterator[str]:
    """The blocks of one kind of file: its top level, then each of its sections."""
    yield f"## {title}"
    yield _summary(schema)
    sections = _sections(schema)
    yield _table(_rows(schema, "", frozenset(sections)))
    for name, classes in sections.items():
        field = schema.model_fields[name]
        yield f"### {name}"
        if name == "deepspeed":
            yield from _deepspeed()
        elif _tagged(field):
            yield key_meanings.meaning(schema, name)
            yield from _kinds(f"{name}.{_item(field)}".rstrip("."), _annotation_of_one(field), "####")
        else:
            yield _summary(classes[0])
            yield _table(_rows(classes[0], f"{name}.{_item(field)}", frozenset(sections) | {"options"}))
        if name == "sources":
            yield from _options()


def _sections(schema: type[Section]) -> dict[str, list[type[Section]]]:
    """The sections of a file by their keys, with their classes."""
    found = {name: _classes(field.annotation) for name, field in schema.model_fields.items()}
    return {name: classes for name, classes in found.items() if classes or name == "deepspeed"}


def _kinds(key: str, annotation: Any, level: str) -> Iterator[str]:
    """A section of which there are several kinds: the keys that all of them have, then each kind's own."""
    by_name, tag = _tags(annotation)
    tables = {name: _rows(section, f"{key}.", frozenset()) for name, section in by_name.items()}
    links = ", ".join(_link(heading, f"`{name}`") for heading, names in _alike(tag, tables).items() for name in names)
    yield f"`{key}.{tag}` ({_default_kind(annotation)}) is one of {links}."
    if common := _common(tables):
        yield _table(common)
    for heading, names in _alike(tag, tables).items():
        yield f"{level} {heading}"
        yield "\n".join(
            f"{f'`{name}`: ' if len(names) > 1 else ''}{_summary(by_name[name])}  " for name in names
        ).rstrip()
        if own := [row for row in tables[names[0]] if row not in common]:
            yield _table(own)


def _options() -> Iterator[str]:
    """`sources.0.options`, for each format."""
    yield "### options"
    yield "By the format of the source."
    tables = {name: _rows(section, "sources.0.options.", frozenset()) for name, section in OPTIONS.items()}
    for heading, names in _alike("format", tables).items():
        yield f"#### {heading}"
        yield _table(tables[names[0]]) if tables[names[0]] else "No options."


def _deepspeed() -> Iterator[str]:
    yield (
        "Keys that are passed on to DeepSpeed, whose [documentation](https://www.deepspeed.ai/docs/config-json/) says "
        "more. Its other keys are refused with the reason: the rest of the run file decides them, or DeepSpeed ignores "
        "them or gets them wrong."
    )
    zero = "deepspeed.zero_optimization"
    sections = {
        "deepspeed": deepspeed_keys.PASSED_ON | deepspeed_keys.NEEDS_LOG,
        zero: deepspeed_keys.ZERO_PASSED_ON,
        **{f"{zero}.{name}": known for name, known in deepspeed_keys.OFFLOAD.items()},
    }
    for section, known in sections.items():
        lines = [[f"`{section}.{key}`", _written(default), meaning] for key, (default, meaning) in known.items()]
        yield _markdown(["key", "default", "meaning"], lines)


def _rows(section: type[Section], prefix: str, linked: frozenset[str]) -> list[Row]:
    """The keys of `section` and of sections inside it, but for those in `linked`, which have a table elsewhere."""
    schema, found = section.model_json_schema(), []
    for key, field in section.model_fields.items():
        classes = _classes(field.annotation)
        if _is_tag(field):
            continue
        elsewhere = key in linked or _tagged(field)
        values = key_meanings.values(schema["properties"][key], lambda value: f"`{value}`")
        if classes or key in linked:
            word = "sections" if _item(field) else "section"
            table = _link(key if key in linked else "objectives", word) if elsewhere else word
            values = values.replace("keys and values", table)
        found.append(Row(f"`{prefix}{key}`", values, _default(section, key), key_meanings.meaning(section, key)))
        if classes and not elsewhere:
            found += _rows(classes[0], f"{prefix}{key}.{_item(field)}", linked)
    return found


def _annotation_of_one(field: FieldInfo) -> Any:
    """The type of a section of which there are several kinds, or of an item of a list of them."""
    if _item(field):
        return get_args(field.annotation)[0]
    discriminated = Field(discriminator=field.discriminator)
    return Annotated[field.annotation, discriminated, *field.metadata]


def _item(field: FieldInfo) -> str:
    """The path from a field that is a list to its first item."""
    return "0." if get_origin(field.annotation) in (list, tuple) else ""


def _default(section: type[Section], key: str) -> str:
    """What holds if the key is left out. Other keys that are left out may decide it, as `profile` does in cleaning."""
    field = section.model_fields[key]
    if field.is_required():
        return "**required**"
    value = getattr(_with_defaults(section), key, field.get_default(call_default_factory=True))
    if isinstance(value, Section):
        tag = next((name for name, one in type(value).model_fields.items() if _is_tag(one)), None)
        return f"`{getattr(value, tag)}`" if tag else ""
    return _written(value)


@cache
def _with_defaults(section: type[Section]) -> Section | None:
    """`section` without any key; None if it has required ones."""
    try:
        return section()
    except ValidationError:
        return None


def _written(value: Any) -> str:
    """A value as YAML has it; "…" for a long one, which its meaning describes."""
    if value == "":
        return '`""`'
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    plain = TypeAdapter(Any).dump_python(value, mode="json", exclude_unset=True)
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`" if len(text) <= 60 else "…"


def _default_kind(annotation: Any) -> str:
    """The kind of a section that doesn't name one."""
    try:
        chosen = TypeAdapter(annotation).validate_python({})
    except ValidationError as error:
        problem = error.errors()[0]
        return "**required**" if problem["type"].startswith("union_tag") else f"default: `{problem['loc'][0]}`"
    return f"default: `{_tag_of(type(chosen))[1]}`"


def _tags(annotation: Any) -> tuple[Kinds, str]:
    """The kinds of a section by name, and the key that names them."""
    found = {_tag_of(section)[1]: section for section in _classes(annotation)}
    return found, _tag_of(next(iter(found.values())))[0]


def _tag_of(section: type[Section]) -> tuple[str, str]:
    """(key, kind) of a kind of section."""
    return next((key, get_args(field.annotation)[0]) for key, field in section.model_fields.items() if _is_tag(field))


def _is_tag(field: FieldInfo) -> bool:
    """Whether the field names the kind of its section: it has one value, and a default."""
    one_value = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
    return one_value and field.default is not PydanticUndefined


def _tagged(field: FieldInfo) -> bool:
    """Whether there are several kinds of this section."""
    return len(_classes(field.annotation)) > 1


def _classes(annotation: Any) -> list[type[Section]]:
    """The classes of sections in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return list(dict.fromkeys(found for argument in get_args(annotation) for found in _classes(argument)))


def _common(tables: dict[str, list[Row]]) -> list[Row]:
    first, *others = tables.values()
    return [row for row in first if all(row in other for other in others)]


def _alike(tag: str, tables: dict[str, list[Row]]) -> dict[str, list[str]]:
    """Kinds with equal keys, under the heading that they share."""
    groups: list[list[str]] = []
    for name in tables:
        group = next((group for group in groups if tables[group[0]] == tables[name]), None)
        groups.append([name]) if group is None else group.append(name)
    return {f"{tag}: " + ", ".join(group): group for group in groups}


def _summary(section: type[Section]) -> str:
    """The first paragraph of the class's docstring."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _table(rows: list[Row]) -> str:
    return _markdown(["key", "values", "default", "meaning"], [list(row) for row in rows])


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table whose columns are aligned in a terminal too, but for the last."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    texts = [[cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)] for line in lines]
    texts.insert(1, ["-" * width for width in [*widths, 7]])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)
