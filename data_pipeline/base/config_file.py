"""Reads typed configs from YAML files, with `extends` and `section.key=value` overrides; reports all problems at once.

Also gives the meaning and the allowed values of each key, for messages and docs/reference/settings.md.
"""

import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticKnownError, core_schema
from yaml import MappingNode, Node, SafeLoader, ScalarNode, SequenceNode, YAMLError

import data_pipeline
from data_pipeline.base import packages, paths
from data_pipeline.base.errors import UserError, one_line

OmegaConf.register_resolver("samples", lambda: str(Path(data_pipeline.__file__).with_name("samples")), replace=True)

# Sections of several kinds, and the key that selects the kind.
_KINDS = {
    "tokenizer": "kind",
    "objective": "name",
    "of": "name",
    "optimizer": "name",
    "schedule": "name",
    "model": "family",
}
_LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "multipleOf": "multiple of",
}
_LEAST_FP32, _LARGEST_FP32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Section(BaseModel):
    """A section of a config file. Unknown keys are errors; values keep their types ("5" is not a number).

    The docstring below a field says what its key means; messages and docs/reference/settings.md show it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that are refused, with the reason."""

    gone: ClassVar[Mapping[str, tuple[Sequence[Any], str]]] = {}
    """Keys of earlier versions: the values that are ignored, since they ask for nothing, and why others are refused."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Earlier names, which are still accepted, and today's names; only for the class of a whole file. "data.pack":
    "packing_ratio" renames a key; "checkpoint.on_failure: go_on": "continue" renames a value."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Other programs' names of keys, and the keys that are meant; only for the class of a whole file."""

    other_files: ClassVar[Mapping[str, str]] = {}
    """Keys of other kinds of files. The value says what kind that is, and which command takes such a file."""

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        """Pydantic would take true, and YAML's `yes` and `on`, for 1."""
        given = values.items() if isinstance(values, Mapping) else ()
        flags = {key: value for key, value in given if isinstance(value, bool) and key in cls.model_fields}
        types = {key: _types_in(cls.model_fields[key].annotation) for key in flags}
        wrong = [key for key in flags if bool not in types[key] and (int in types[key] or float in types[key])]
        if wrong:
            raise ValueError("\n".join(f"{key}: expected a number, got {str(flags[key]).lower()}" for key in wrong))
        return values

    @model_validator(mode="before")
    @classmethod
    def _without_gone_keys(cls, given: Any) -> Any:
        """Run files of earlier versions, such as a run's own config.yaml, have every key, most with its default."""
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if key not in cls.gone or value not in cls.gone[key][0]}

    @model_validator(mode="before")
    @classmethod
    def _null_is_empty(cls, given: Any) -> Any:
        """null for a list, or for keys and values, that are empty by default means an empty one."""
        if not isinstance(given, Mapping):
            return given
        empty = {key for key, field in cls.model_fields.items() if field.default in ([], {})}
        return {key: value for key, value in given.items() if value is not None or key not in empty}

    @field_validator("*")
    @classmethod
    def _is_computed_with(cls, value: Any) -> Any:
        """Tensors hold integers of 64 bits and fp32; smaller fp32 numbers count as 0."""
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise ValueError(f"expected an integer from -2**63 to 2**63 - 1, got {one}")
            if isinstance(one, float) and one and not _LEAST_FP32 <= abs(one) <= _LARGEST_FP32:
                raise ValueError(f"expected 0, or a number from 1.2e-38 to 3.4e38 as fp32 has them, got {one}")
        return value


ConfigType = TypeVar("ConfigType", bound=Section)
LocalPath = Annotated[str, AfterValidator(paths.local), WithJsonSchema({"type": "string", "format": "path"})]
Location = Annotated[str, AfterValidator(paths.location), WithJsonSchema({"type": "string", "format": "path or URL"})]
Locations = Annotated[
    str | list[str],
    AfterValidator(lambda given: paths.location(given) if isinstance(given, str) else [*map(paths.location, given)]),
]
"""Files: a path, a glob, or a list of them, local or as fsspec URLs."""
TrueIsTheDefaults = BeforeValidator(lambda given: ({} if given else None) if isinstance(given, bool) else given)
"""For an optional section: true means its defaults, false means null."""


class OneOf:
    """Annotates a section of several kinds: the value of `key` names the class of a section in `kinds`.

    A section without the `key` is of the kind `default`, if there is one. A class is looked up when a section names it;
    a union of the classes would need all of them.
    """

    def __init__(self, key: str, kinds: Mapping[str, type[BaseModel]], default: str | None = None):
        self.key, self.kinds, self.default = key, kinds, default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            lambda given, info: given if isinstance(given, source) else self._read(given, info)
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "object"}

    def _read(self, given: Any, info: ValidationInfo) -> BaseModel:
        if not isinstance(given, Mapping):
            raise PydanticKnownError("model_type", {"class_name": "Section"})
        kind = given.get(self.key, self.default)
        if kind is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": repr(self.key)})
        if not isinstance(kind, str) or kind not in self.kinds:
            names = ", ".join(map(repr, self.kinds))
            context = {"discriminator": repr(self.key), "tag": str(kind), "expected_tags": names}
            raise PydanticKnownError("union_tag_invalid", context)
        # problems are located below the name of the kind, as those of a union are
        values, adapter = {kind: {self.key: kind, **given}}, _named(self.kinds[kind])
        if info.mode == "json":  # a file whose values keep their types
            return adapter.validate_json(json.dumps(values), strict=True)[kind]
        return adapter.validate_python(values)[kind]


@functools.cache
def _named(section: type[BaseModel]) -> TypeAdapter[dict[str, BaseModel]]:
    return TypeAdapter(dict[str, section])  # type: ignore[valid-type]


Given = str | Path | Mapping[str, Any]
"""A config in Python code: a path, `configs:NAME` for a file that ships, or the keys and values of a file."""


def load(path: Given, overrides: Sequence[str], schema: type[ConfigType]) -> ConfigType:
    """The config in the file at `path` with `overrides` applied, checked against `schema`.

    Each override has the form "section.key=value"; a number selects an item of a list ("sources.0.path=…"). `extends`
    lists the files that a file starts from: paths relative to it, or `configs:NAME` for files that ship. They are
    merged in order, the file itself last. A line on stderr says which earlier names of keys were found. Raises
    UserError, which names the file, each wrong key and the nearest valid key.
    """
    given, path = _merged(path, overrides, schema), _name(path)
    if not any(field.is_required() and name in given for name, field in schema.model_fields.items()):
        for key in schema.other_files.keys() & given.keys():
            raise UserError(f"{path}: {schema.other_files[key].format(path)}")
    try:
        plain = OmegaConf.to_container(given, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    return check(plain, schema, str(path))


def load_with(config: Given, changes: Mapping[str, Any], schema: type[ConfigType]) -> ConfigType:
    """`load` for Python code: `changes` has values by their keys."""
    return load(path_of(config), as_overrides(changes), schema)


def path_of(config: Given) -> Path | Mapping[str, Any]:
    """The path of `config`; keys and values stay as they are. Raises UserError for a URL and an unknown NAME."""
    if isinstance(config, Mapping):
        return config
    try:
        return Path(paths.config(str(config)))
    except ValueError as error:
        raise UserError(str(error)) from None


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """{"tokenizer": {"vocab_size": 500}}  ->  ['tokenizer={"vocab_size": 500}'], since JSON is YAML."""
    return [f"{key}={_as_json(value, f'{key}: ')}" for key, value in changes.items()]


def _as_json(value: Any, where: str) -> str:
    """`value` as JSON, with paths as text and NumPy's numbers as numbers. Raises UserError for other objects."""

    def plain(one: Any) -> Any:
        if isinstance(one, os.PathLike):
            return os.fspath(one)
        if callable(item := getattr(one, "item", None)):
            return item()
        raise UserError(f"{where}expected values as in a YAML file, got {one!r}")

    return json.dumps(value, default=plain, ensure_ascii=False)


def _name(config: Given) -> Path:
    """The name of a config in messages; the paths of what it extends are relative to it."""
    return Path("config") if isinstance(config, Mapping) else Path(config)


def _merged(config: Given, overrides: Sequence[str], schema: type[Section]) -> DictConfig:
    if isinstance(config, Mapping):
        given = OmegaConf.create(json.loads(_as_json(config, "config: ")))
        merged = _extended(given, _name(config), (), schema)
    else:
        merged = _read(Path(config), (), schema)
    updates = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r}: an override has the form section.key=value")
        with _applying(override):
            _refuse_ambiguous(value, repr(override))
            updates.append(OmegaConf.from_dotlist([override]))
            _forget_other_kinds(merged, updates[-1], _default_kinds(schema))
    for override, update in zip(overrides, updates, strict=True):
        with _applying(override):
            if (new := _with_new_names(update, schema, "")) is not update:
                merged.merge_with(new)
            else:
                merged.merge_with_dotlist([override])  # an index in its key selects an item of a list
    return merged


@contextlib.contextmanager
def _applying(override: str) -> Iterator[None]:
    """Raises UserError, which names `override`, for an error of the block."""
    try:
        yield
    except (OmegaConfBaseException, YAMLError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"{override!r}: can't be applied: {one_line(error)}") from None


def merged(config: Given, overrides: Sequence[str], schema: type[Section]) -> str:
    """The YAML of a config file together with what it extends and `overrides`. Raises UserError as `load`."""
    return OmegaConf.to_yaml(_merged(config, overrides, schema))


def sections(path: str | Path, overrides: Sequence[str]) -> set[str]:
    """The sections that a config file has, which tell its kind. Raises UserError as `load`."""
    return {str(key) for key in _merged(path, overrides, Section)}


def check(values: Any, schema: type[ConfigType], path: str) -> ConfigType:
    """Validates `values` against `schema`. Raises UserError, which lists every problem with its key."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in problems(error, schema))) from None


def problems(error: ValidationError, schema: type[BaseModel]) -> list[str]:
    """One line for each problem of `error`, beginning with the key."""
    first: dict[str, tuple[ErrorDetails, _Place]] = {}  # pydantic reports a problem for each type that a key may have
    for problem in error.errors():
        place = _walk(schema, problem["loc"])
        first.setdefault(".".join(place.names), (problem, place))
    return [line for key, found in first.items() for line in _describe(schema, key, *found).splitlines()]


def _read(path: Path, seen: tuple[Path, ...], schema: type[Section]) -> DictConfig:
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself")
    with paths.opening(str(path)):
        _refuse_ambiguous(path.read_text(encoding="utf-8"), f"{path}")
        config = OmegaConf.load(path)
    if not isinstance(config, DictConfig):
        raise UserError(f"{path}: expected keys and values at the top level")
    return _extended(config, path, (*seen, path.resolve()), schema)


def _refuse_ambiguous(text: str, where: str) -> None:
    """Raises UserError for numbers in `text`, which is YAML, that aren't in base 10 and don't show that.

    YAML 1.1 takes 010 for 8 and 1:30 for 90; other versions take these for 10 and for text. `yes`, `no`, `on` and `off`
    are true and false, and 1_000 is 1000, as in Python.
    """
    for key, found in _scalars(yaml.compose(text, SafeLoader)):
        is_plain = found.style is None and found.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        digits = found.value.replace("_", "").lstrip("+-")
        if is_plain and (":" in digits or (digits.isdigit() and digits.startswith("0"))):
            value = yaml.safe_load(found.value)
            meant = [] if ":" in digits else [int(digits)]
            if meant != [abs(value)]:
                sign = "-" if found.value.startswith("-") else ""
                numbers = " or ".join(f"{sign}{one}" for one in (*meant, abs(value)))
                base = "60" if ":" in digits else "8"
                way_out = f'write {numbers}, or "{found.value}" in quotes for text'
                place = f"{where}: {key}" if key else where
                raise UserError(f"{place}: YAML takes {found.value} for {value}, a number in base {base}; {way_out}")


def _scalars(node: Node | None, key: str = "") -> Iterator[tuple[str, ScalarNode]]:
    """The scalars of a YAML document, keys included, with the key below which each is."""
    below: list[tuple[str, Node]] = []
    if isinstance(node, ScalarNode):
        yield key, node
    elif isinstance(node, SequenceNode):
        below = [(str(number), one) for number, one in enumerate(node.value)]
    elif isinstance(node, MappingNode):
        yield from ((key, name) for name, _ in node.value if isinstance(name, ScalarNode))
        below = [(str(name.value), one) for name, one in node.value]
    for name, one in below:
        yield from _scalars(one, f"{key}.{name}" if key else name)


def _extended(config: DictConfig, path: Path, seen: tuple[Path, ...], schema: type[Section]) -> DictConfig:
    """The `config` in the file at `path`, merged with what it extends."""
    bases = _bases(config, path)
    try:
        parents = [path.parent / paths.config(base) for base in bases]
    except ValueError as error:
        raise UserError(f"{path}: extends: {error}") from None
    merged = OmegaConf.create()
    config = _with_new_names(config, schema, f"{path}: ")
    for part in (*(_read(parent, seen, schema) for parent in parents), config):
        _forget_other_kinds(merged, part, _default_kinds(schema))
        merged.merge_with(part)
    return merged


def _bases(config: DictConfig, path: Path) -> list[str]:
    """Removes `extends` from the `config` in the file at `path`, and returns the files that it names."""
    try:
        given = config.pop("extends", None)
        bases = [] if given is None else [*given] if isinstance(given, ListConfig) else [given]
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: extends: {one_line(error)}") from None
    for base in bases:
        if not isinstance(base, str):
            raise UserError(f"{path}: extends: expected a path or a list of paths, got {base!r}")
    return bases


def _with_new_names(config: DictConfig, schema: type[Section], where: str) -> DictConfig:
    """`config` itself, or a copy in which today's names replace earlier ones. A line on stderr says which.

    Raises UserError if `config` has a key under both names.
    """
    plain: Any = OmegaConf.to_container(config)
    replaced = []
    for old, new in schema.renamed.items():
        path, _, value = old.partition(": ")
        *above, name = path.split(".")
        section = plain
        for key in above:
            section = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section or (value and section[name] != value):
            continue
        if value:
            section[name] = new
            replaced.append(f"{old} is called {new} now")
        elif new in section:
            raise UserError(f"{where}{path}: is called {new} now, which is given, too; leave {name} out")
        else:
            section[new] = section.pop(name)
            replaced.append(f"{path} is called {'.'.join([*above, new])} now")
    if not replaced:
        return config
    _warn_once(f"warning: {where}{', '.join(replaced)}")
    named: DictConfig = OmegaConf.create(plain)
    return named


@functools.cache
def _warn_once(line: str) -> None:
    if "RANK" not in os.environ:  # `launch` prints the line before it starts the ranks
        print(line, file=sys.stderr)


def _default_kinds(schema: type[Section]) -> dict[str, str]:
    """The kinds of the sections of a file that name none, by the section's key."""
    return {
        key: one.default
        for key, field in schema.model_fields.items()
        for one in field.metadata
        if isinstance(one, OneOf) and one.default
    }


def _forget_other_kinds(config: DictConfig, update: DictConfig, default_kinds: Mapping[str, str]) -> None:
    """Empties the sections of `config` whose kind `update` changes: a kind's keys don't apply to another kind."""
    for key, value in update.items_ex(resolve=False):
        if not isinstance(value, DictConfig) or not isinstance(config.get(key), DictConfig):
            continue
        kind = _KINDS.get(str(key), "")
        if kind in value and config[key].get(kind, default_kinds.get(str(key), value[kind])) != value[kind]:
            config[key] = {}
        _forget_other_kinds(config[key], value, default_kinds)


def _describe(schema: type[BaseModel], key: str, problem: ErrorDetails, place: "_Place") -> str:
    """Describes the problem with `key` in one line, or in several where a validator names several problems."""
    if problem["type"] == "extra_forbidden":
        *above, name = place.names
        for section in place.sections:
            if issubclass(section, Section) and name in section.refused:
                return f"{key}: {section.refused[name]}"
            if issubclass(section, Section) and name in section.gone:
                return f"{key}: {section.gone[name][1]}"
        known = [field for section in place.sections for field in section.model_fields]
        near = [".".join([*above, one]) for one in difflib.get_close_matches(name, known, n=1, cutoff=0.5)]
        nearest = [one for one in _elsewhere(schema, name, known) if one != key] or near
        return f"{key}: unknown key" + (f"; nearest valid key: {nearest[0]}" if nearest else "")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return "\n".join(f"{key}: {line}" if key else line for line in message.splitlines())
    if problem["type"] == "union_tag_not_found":
        return f"{key}.{problem['ctx']['discriminator']}: missing".replace("'", "")
    if problem["type"] == "union_tag_invalid":
        kind, known_kinds = (problem["ctx"][name].replace("'", "") for name in ("discriminator", "expected_tags"))
        tag = problem["ctx"]["tag"]
        hint = packages.missing_under(place.names, tag)
        return f"{key}.{kind}: expected one of {known_kinds}, got {tag!r}{hint and f'; {hint}'}"
    holder, field = place.field or (Section, "")
    brief = in_brief(meaning(holder, field))
    means = f" ({brief})" if brief else ""
    if problem["type"] == "missing":
        return f"{key}: missing{means}"
    expected = "expected keys and values" if problem["type"] == "model_type" else message[:1].lower() + message[1:]
    if place.names[-1:] == [field]:  # the field itself, not an item of its list
        expected = f"expected {allowed_values(holder.model_json_schema()['properties'][field])}"
    hint = packages.missing_under(place.names, problem["input"]) if problem["type"] == "literal_error" else ""
    if isinstance(problem["input"], bool) and problem["type"] in ("string_type", "literal_error"):
        hint = "YAML takes yes, no, on and off for true and false; write text in quotes"
    return f"{key}: {expected}, got {problem['input']!r}{means}{hint and f'; {hint}'}"


def _elsewhere(schema: type[BaseModel], name: str, known: Sequence[str]) -> list[str]:
    """The one key of the file that has this name in another section, or that another program calls by this name."""
    if issubclass(schema, Section) and name in schema.elsewhere:
        return [schema.elsewhere[name]]
    found = [key for key in _keys(schema) if key.rpartition(".")[2] == name]
    return found if len(found) == 1 and name not in known else []


@functools.cache
def _keys(section: type[BaseModel]) -> list[str]:
    """The dotted keys of `section` and of the sections below, without those in lists."""
    found: dict[str, None] = {}
    for name, field in section.model_fields.items():
        found[name] = None
        if get_origin(field.annotation) is not list:
            found |= {f"{name}.{key}": None for below in sections_in(field) for key in _keys(below)}
    return list(found)


class _Place(NamedTuple):
    """A place in a config file.

    Attributes:
        names: the keys on the way to the place.
        sections: the sections that may stand there.
        field: (section, key) of the field that contains the place.
    """

    names: list[str]
    sections: list[type[BaseModel]]
    field: tuple[type[BaseModel], str] | None


def _walk(schema: type[BaseModel], location: Sequence[Any]) -> _Place:
    """The place of a problem that pydantic has found at `location`; looks inside lists, optionals and unions.

    Two kinds of names in pydantic's location are no keys of the file: the kind of a section, and the type that pydantic
    tried for a value of several types.
    """
    names: list[str] = []
    sections: list[type[BaseModel]] = [schema]
    field: tuple[type[BaseModel], str] | None = None
    for part in location:
        holders = [section for section in sections if part in section.model_fields]
        if holders:
            field = (holders[0], part)
            sections = [model for holder in holders for model in sections_in(holder.model_fields[part])]
        elif kinds := [section for section in sections if part in _kinds(section)]:
            sections = kinds
            continue
        elif part == "[key]" or (not sections and field and isinstance(part, str) and not _is_mapping(*field)):
            break
        names.append(str(part))
    return _Place(names, sections, field)


def _is_mapping(section: type[BaseModel], key: str) -> bool:
    return get_origin(section.model_fields[key].annotation) is dict


def _kinds(section: type[BaseModel]) -> tuple[Any, ...]:
    """The names that select this section, if it is one of several kinds."""
    named = (section.model_fields.get(key) for key in ("name", "family", "hook", "kind", "step"))
    return tuple(kind for field in named if field is not None for kind in get_args(field.annotation))


def _types_in(annotation: Any) -> list[Any]:
    """The types in a union, or in what is annotated."""
    arguments = get_args(annotation)
    return [one for argument in arguments for one in _types_in(argument)] if arguments else [annotation]


def sections_in(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes of the sections that a field may hold, of all kinds."""
    return list(dict.fromkeys(_models_in(field.rebuild_annotation())))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        kinds = [one.kinds.values() for one in annotation.__metadata__ if isinstance(one, OneOf)]
        return [*itertools.chain(*kinds)] if kinds else _models_in(annotation.__origin__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def meaning(section: type[BaseModel], key: str) -> str:
    """The docstring below the field `key` of `section`, in one line; else the field's description, or "".

    A field that a subclass declares again without a docstring keeps the parent's docstring.
    """
    for parent in section.__mro__:
        if issubclass(parent, BaseModel) and key in parent.model_fields and (found := _docstrings(parent).get(key)):
            return " ".join(found.split())
    field = section.model_fields.get(key)
    return (field and field.description) or ""


@functools.cache
def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of the class. Pydantic would parse all classes' sources at import."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError):  # made without source
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: below.value.value
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def in_brief(meaning: str) -> str:
    """The first sentence of a meaning, for parentheses: "Rows per step. null: …" -> "rows per step"."""
    sentence = meaning.split(". ")[0].removesuffix(".").replace("`", "")
    first_word = sentence.split(" ")[0].rstrip(",:")
    return sentence[:1].lower() + sentence[1:] if re.fullmatch("[A-Z][a-z]*", first_word) else sentence


def allowed_values(schema: dict[str, Any], quote: Callable[[str], str] = str) -> str:
    """The values that the JSON Schema of a key allows: "integer > 0, auto or null". `quote` marks literal values."""
    texts = _alternatives(schema, quote)
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _alternatives(schema: dict[str, Any], quote: Callable[[str], str]) -> list[str]:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        found = [text for option in options for text in _alternatives(option, quote)]
        return list(dict.fromkeys(found))
    if literals := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return [quote(str(literal)) for literal in literals]
    if "$ref" in schema:
        return ["keys and values"]
    kind = schema.get("type", "")
    if kind == "boolean":
        return [quote("true"), quote("false")]
    if kind == "null":
        return [quote("null")]
    if kind == "array":
        if of_fixed_length := schema.get("prefixItems"):
            return [f"list of {len(of_fixed_length)}, each {allowed_values(of_fixed_length[0], quote)}"]
        return ["non-empty " * bool(schema.get("minItems")) + f"list of {allowed_values(schema['items'], quote)}"]
    if kind == "string":
        return ["non-empty " * bool(schema.get("minLength")) + schema.get("format", "text")]
    limits = [f"{sign} {schema[name]:,.10g}" for name, sign in _LIMITS.items() if name in schema]
    return [" ".join(["keys and values" if kind == "object" else kind, ", ".join(limits)]).strip()]
