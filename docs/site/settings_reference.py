"""Prints the page docs/reference/settings.md: every key of corpus and run files, from their classes. With the name of
a package in `examples`, prints the keys that the package adds.

python -m docs.site.settings_reference > docs/reference/settings.md
python -m docs.site.settings_reference lion > examples/lion/settings.md
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from data_pipeline.base.config_file import Section, allowed_values, meaning, sections_in
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.objectives.objective import TrainingObjective
from data_pipeline.sources.formats import FORMATS
from pretrain.config import RunConfig

_INTRODUCTION = """\
# Settings

Every key of corpus files and of run files. `python -m docs.site.settings_reference` prints this page from the code,
where each key's meaning stands below its field.

Keys are written as on the command line, where `checkpoint.every_steps=500` sets one; a number is the index in a list,
from 0. A key without a default is **required**; a section without one has the defaults of its keys. `null` empties a
list that is empty by default and that an extended file fills. Keys with the same meaning share a line, and the line
names the kinds that have the key. Another kind of a section, such as another `schedule.name`, empties the section that
files have filled; overrides are applied after that, in any order.

At the top of a file, `extends: [other.yaml]` names files to start from, by paths relative to it or, if they ship with
the package, as `configs:models/t5-v1.1-base.yaml`. They are merged in order, the file itself last. `${samples:}` stands
for the directory of the sample texts.
"""


PACKAGES = sorted(page.parent.name for page in Path(__file__).parents[2].glob("examples/*/settings.md"))
"""The packages in `examples` that add keys; each has a page beside its code."""


class _Tag(NamedTuple):
    """Where packages' kinds of a section are named: the section's path, the key that names the kind, and the section's
    heading in settings.md."""

    path: str
    key: str
    heading: str


# By entry point.
_TAGS = {
    "families": _Tag("model", "family", "model"),
    "hooks": _Tag("evaluation.0", "hook", "evaluation"),
    "optimizers": _Tag("optimizer", "name", "optimizer"),
    "wrappers": _Tag("wrapper", "name", "wrapper"),
    "steps": _Tag("steps.0", "step", "steps"),
}


class Row(NamedTuple):
    """A row of a table, in Markdown.

    Attributes:
        keys: the keys that the row is about: several if they mean the same.
        kinds: the kinds of the section that have the keys; "" in a table of one kind.
    """

    keys: tuple[str, ...]
    values: str
    default: str
    meaning: str
    kinds: str = ""

    @property
    def said(self) -> tuple[str, str]:
        """The key's name and meaning, which are equal in the rows of several kinds that become one."""
        return (self.keys[0].rpartition(".")[2], self.meaning)

    @property
    def same(self) -> tuple[str, ...]:
        """All that is equal in `cleaning.gopher.min_words` and `steps.0.min_words`."""
        return (*self.said, self.values, self.default)


@dataclass(frozen=True)
class Part:
    """A heading of the page with its text and its table. `tag`: the key that names the kinds in the table."""

    level: int
    heading: str
    text: str
    rows: list[Row]
    tag: str = ""

    def __str__(self) -> str:
        table = [_table(self.rows, self.tag)] if self.rows else []
        return "\n\n".join([f"{'#' * self.level} {self.heading}", self.text, *table])


def page() -> str:
    """The whole page, in Markdown."""
    parts = list(_parts())
    return "\n\n".join([_INTRODUCTION + "\n" + _contents(parts), *map(str, parts)]) + "\n"


def package_page(package: str) -> str:
    """The keys that a package in `examples` adds, in Markdown."""
    reference = {part.heading: part.rows for part in _parts()}
    parts: list[Part] = []
    for kinds, tag in _TAGS.items():
        if found := _offered(kinds, package):
            text = f"Values of `{tag.path}.{tag.key}`: {', '.join(f'`{name}`' for name in found)}."
            parts += _kinds(2, tag.heading, text, tag.path, tag.key, found, reference[tag.heading])
    introduction = (
        f"# Settings of {package}\n\nThe keys that the package adds. "
        f"`python -m docs.site.settings_reference {package}` prints this page from the code."
    )
    return "\n\n".join([introduction, *map(str, parts)]) + "\n"


def _offered(kinds: str, package: str) -> dict[str, type[Section]]:
    """The classes of settings that `package` offers under the entry point of `kinds`, by name."""
    entries = entry_points(group=f"encdec_pretrain.{kinds}")
    return {entry.name: entry.load() for entry in sorted(entries) if _package(entry.module) == package}


def _package(module: str) -> str:
    return module.partition(".")[0]


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
    yield from _of_a_section(
        2,
        "Objectives",
        "What a model learns from a row: `rows.objective` of a corpus file, or `data.objective` of a run file. "
        "[How they compare](../explanation/objectives.md).",
        "objective",
        FieldInfo.from_annotation(TrainingObjective),
    )
    yield from file_parts("Run files", RunConfig)


def file_parts(title: str, schema: type[Section]) -> list[Part]:
    """The parts of one kind of file: its top level, then each of its sections."""
    classes = {name: sections_in(field) for name, field in schema.model_fields.items()}
    sections = [name for name, found in classes.items() if found]
    parts = [Part(2, title, _summary(schema), _rows(schema, "", frozenset(sections)))]
    for name in sections:
        field = schema.model_fields[name]
        if _tagged(field):
            key = f"{name}.{_item(field)}".rstrip(".")
            parts += _of_a_section(3, name, meaning(schema, name), key, _of_one(field))
        else:
            (section,) = classes[name]
            rows = _rows(section, f"{name}.{_item(field)}", frozenset(sections) | {"options"})
            parts.append(Part(3, name, _with_packages(_summary(section), name), rows))
        if name == "sources":
            options = {format_: known.options for format_, known in FORMATS.items()}
            parts += _kinds(3, "options", "By the format of the source.", "sources.0.options", "format", options)
    return _said_once(parts)


def _said_once(parts: list[Part]) -> list[Part]:
    """`parts`, in which rows of a section that a table of kinds has, too, are in that table alone."""
    of_kinds = {row.same: part.heading for part in parts if part.tag or ": " in part.heading for row in part.rows}
    elsewhere: dict[tuple[str, ...], tuple[str, ...]] = {}
    left = []
    for part in parts:
        moved = [] if part.heading in of_kinds.values() else [row for row in part.rows if row.same in of_kinds]
        for row in moved:
            elsewhere[row.same] = (*elsewhere.get(row.same, ()), *row.keys)
        if moved:
            tables = dict.fromkeys(of_kinds[row.same] for row in moved)
            links = ", ".join(_link(heading, f"`{heading}`") for heading in tables)
            text = f"{part.text}\n\nMore keys are in the tables of {links}."
            part = replace(part, text=text, rows=[row for row in part.rows if row not in moved])
        left.append(part)
    return [
        replace(part, rows=[row._replace(keys=row.keys + elsewhere.get(row.same, ())) for row in part.rows])
        if part.heading in of_kinds.values()
        else part
        for part in left
    ]


def _of_a_section(level: int, heading: str, text: str, key: str, field: FieldInfo) -> list[Part]:
    """The parts of a section of several kinds, without the kinds of packages."""
    kinds = {kind: section for section in sections_in(field) for _, kind in _tags(section)}
    ((tag, _),) = _tags(next(iter(kinds.values())))
    kinds = {name: section for name, section in kinds.items() if _package(section.__module__) in _OWN}
    links = ", ".join(_link(f"{tag}: {name}", f"`{name}`") for name in kinds)
    said = f"{text}\n\n`{key}.{tag}` ({_default_kind(field)}) is one of {links}."
    return _kinds(level, heading, _with_packages(said, heading), key, tag, kinds)


_OWN = ("data_pipeline", "pretrain")


def _with_packages(text: str, heading: str) -> str:
    """`text`, followed by links to the kinds of the section that packages in `examples` offer."""
    links = [
        f"[`{name}`](../../examples/{package}/settings.md#{anchor(f'{tag.key}: {name}')})"
        for kinds, tag in _TAGS.items()
        if tag.heading == heading
        for package in PACKAGES
        for name in _offered(kinds, package)
    ]
    return f"{text} Packages in `examples` offer {', '.join(links)}." if links else text


def _kinds(
    level: int,
    heading: str,
    text: str,
    path: str,
    tag: str,
    kinds: Mapping[str, type[Section]],
    reference: Sequence[Row] = (),
) -> list[Part]:
    """The parts of a section of several kinds. Its table has the keys of several kinds, and those of a kind that has
    few others; other kinds have a table of their own. A package's page leaves out the rows of the `reference`."""
    known = {row.same for row in reference}
    tables = {name: _rows(section, f"{path}.", frozenset()) for name, section in kinds.items()}
    having: dict[tuple[str, str], dict[str, Row]] = {}
    for kind, rows in tables.items():
        for row in rows:
            if row.same not in known:
                having.setdefault(row.said, {})[kind] = row
    own = {kind: [row for row in rows if list(having.get(row.said, [])) == [kind]] for kind, rows in tables.items()}
    own = {kind: rows if len(rows) >= _ENOUGH or len(kinds) == 1 else [] for kind, rows in own.items()}
    of_one_kind = {row.said for rows in own.values() for row in rows}
    common = [_of_kinds(rows, len(tables)) for said, rows in having.items() if said not in of_one_kind]
    parts = [Part(level, heading, text, common, tag)]
    for name, section in kinds.items():
        words = [_summary(section) if tables[name] else "No options."]
        above = {row.said for row in common if row.kinds != "all" or reference}
        for place, keys in (
            (
                f"table above](#{anchor(heading)})",
                [row for row in tables[name] if row.said in above and row.same not in known],
            ),
            (
                f"reference](../../docs/reference/settings.md#{anchor(heading)})",
                [row for row in tables[name] if row.same in known],
            ),
        ):
            names = ", ".join(f"`{key.removeprefix(f'{path}.')}`" for row in keys for key in row.keys)
            words += [f"Keys in the [{place}: {names}."] if names else []
        parts.append(Part(level + 1, f"{tag}: {name}", " ".join(words), own[name]))
    return parts


_ENOUGH = 5
"""A kind with at least as many keys of its own has a table of its own."""


def _of_kinds(rows: Mapping[str, Row], number: int) -> Row:
    """The rows that kinds, of `number` kinds in all, have for a key as one row, with what differs for each kind."""
    first = next(iter(rows.values()))
    return Row(
        tuple(dict.fromkeys(key for row in rows.values() for key in row.keys)),
        _of_each({kind: row.values for kind, row in rows.items()}),
        _of_each({kind: row.default for kind, row in rows.items()}),
        first.meaning,
        "all" if len(rows) == number else ", ".join(rows),
    )


def _of_each(texts: Mapping[str, str]) -> str:
    """The text of all kinds, or each text with its kinds: "`0.1` (vanilla), `0.0` (t5, bart)"."""
    kinds: dict[str, list[str]] = {}
    for kind, text in texts.items():
        kinds.setdefault(text, []).append(kind)
    return (
        next(iter(kinds)) if len(kinds) == 1 else ", ".join(f"{text} ({', '.join(of)})" for text, of in kinds.items())
    )


def _rows(section: type[Section], prefix: str, linked: frozenset[str]) -> list[Row]:
    """The keys of `section` and of the sections inside it, except those in `linked`, which have a table elsewhere."""
    return _in_one_row(_each_key(section, prefix, linked))


def _in_one_row(rows: Iterable[Row]) -> list[Row]:
    """`rows`; those with the same name and meaning become one: `model.encoder.d_ff` and `model.decoder.d_ff`."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        known = found.get(row.same)
        found[row.same] = known._replace(keys=(*known.keys, *row.keys)) if known else row
    return list(found.values())


def _each_key(section: type[Section], prefix: str, linked: frozenset[str]) -> Iterator[Row]:
    schema = section.model_json_schema()
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
        yield Row((f"{prefix}{key}",), values, _default(section, key), meaning(section, key))
        if classes and not elsewhere:
            yield from _each_key(classes[0], f"{prefix}{key}.{_item(field)}", linked)


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


def _table(rows: Sequence[Row], tag: str) -> str:
    """A table whose columns, except the last, are aligned in a terminal, too. `tag`: the heading of the column of
    kinds, if the table has one."""
    head = ["key", "values", "default", *([tag] if tag else []), "meaning"]
    lines = [head]
    for row in rows:
        keys = ", ".join(f"`{key}`" for key in row.keys)
        lines.append([keys, row.values, row.default, *([row.kinds] if tag else []), row.meaning])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    texts = [[*map(str.ljust, line[:-1], widths), line[-1]] for line in lines]
    texts.insert(1, ["-" * width for width in (*widths, 7)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


if __name__ == "__main__":
    print(package_page(*sys.argv[1:]) if sys.argv[1:] else page(), end="")
