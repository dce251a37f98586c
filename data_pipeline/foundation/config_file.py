"""Typed configs from YAML files, with `extends`, `section.key=value` overrides and all problems reported at once."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from yaml import YAMLError

import data_pipeline
from data_pipeline.foundation import paths
from data_pipeline.foundation.errors import UserError

OmegaConf.register_resolver("samples", lambda: str(Path(data_pipeline.__file__).with_name("samples")), replace=True)


# The sections that have several kinds, and the key that selects the kind.
_KINDS = {"objective": "name", "optimizer": "name", "schedule": "name", "model": "family"}


class Section(BaseModel):
    """A part of a config file. Unknown keys are errors; values keep their types ("5" is not a number)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


ConfigType = TypeVar("ConfigType", bound=Section)
LocalPath = Annotated[str, AfterValidator(paths.local)]
Location = Annotated[str, AfterValidator(paths.location)]  # a local path or a fsspec URL


def load(path: str | Path, overrides: Sequence[str], schema: type[ConfigType]) -> ConfigType:
    """The config in the file at `path` with `overrides` applied, checked against `schema`.

    Each override has the form "section.key=value"; a number selects an item of a list ("sources.0.path=…"). Under
    `extends`, a file may name other files to start from, by paths relative to itself. They are merged in order, the
    file itself last. Raises UserError, which names the file, each wrong key and the nearest valid key.
    """
    merged = _read(Path(path), ())
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r}: an override has the form section.key=value")
        try:
            parsed = OmegaConf.create(f"value: {value}").value
            update = OmegaConf.create()
            OmegaConf.update(update, key, parsed, force_add=True)
            _forget_other_kinds(merged, update)
            OmegaConf.update(merged, key, parsed, force_add=True)
        except (OmegaConfBaseException, YAMLError, ValueError, IndexError, TypeError) as error:
            raise UserError(f"{override!r}: can't be applied: {_first_line(error)}") from None
    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    return check(plain, schema, str(path))


def check(values: Any, schema: type[ConfigType], path: str) -> ConfigType:
    """Validates `values` against `schema`. Raises UserError, which lists every problem with its key."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [_describe(dict(problem), schema) for problem in error.errors()]
        lines = [line for problem in problems for line in problem.splitlines()]
        raise UserError("\n".join(f"{path}: {line}" for line in lines)) from None


def _read(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself")
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {_first_line(error)}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, DictConfig):
        raise UserError(f"{path}: expected keys and values at the top level")
    bases = config.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    try:
        parents = [path.parent / paths.local(base) for base in bases]
    except ValueError as error:
        raise UserError(f"{path}: extends: {error}") from None
    merged = OmegaConf.create()
    for part in (*(_read(parent, (*seen, path.resolve())) for parent in parents), config):
        _forget_other_kinds(merged, part)
        merged.merge_with(part)
    return merged


def _forget_other_kinds(config: DictConfig, update: DictConfig) -> None:
    """Empties the sections of `config` whose kind `update` changes: the old kind's keys don't apply to the new one."""
    for key, value in update.items_ex(resolve=False):
        if not isinstance(value, DictConfig) or not isinstance(config.get(key), DictConfig):
            continue
        kind = _KINDS.get(str(key), "")
        if kind in value and config[key].get(kind, value[kind]) != value[kind]:
            config[key] = {}
        _forget_other_kinds(config[key], value)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _describe(problem: dict[str, Any], schema: type[BaseModel]) -> str:
    location, _ = _walk(schema, problem["loc"])
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        *parents, name = problem["loc"]
        above, candidates = _walk(schema, parents)
        known = [field for candidate in candidates for field in candidate.model_fields]
        nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f"; nearest valid key: {'.'.join([*above, nearest[0]])}" if nearest else ""
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return "\n".join(f"{key}: {line}" if key else line for line in message.splitlines())
    return f"{key}: {message[0].lower() + message[1:]}, got {problem['input']!r}"


def _walk(schema: type[BaseModel], location: Sequence[Any]) -> tuple[list[str], list[type[BaseModel]]]:
    """(keys as the file spells them, sections that are possible there); looks inside lists, optionals and unions.

    For a section with several kinds, pydantic's location includes the name of the kind, which is no key of the file.
    """
    keys: list[str] = []
    candidates: list[type[BaseModel]] = [schema]
    for part in location:
        following = [
            model
            for candidate in candidates
            if part in candidate.model_fields
            for model in _models_in(candidate.model_fields[part].annotation)
        ]
        kinds = [candidate for candidate in candidates if part in _kinds(candidate)]
        if kinds and not any(part in candidate.model_fields for candidate in candidates):
            candidates = kinds
            continue
        keys.append(str(part))
        candidates = following or candidates  # an index into a list is no field
    return keys, candidates


def _kinds(section: type[BaseModel]) -> tuple[Any, ...]:
    """The names that select this kind of section, if it is one of several kinds."""
    named = (section.model_fields.get(key) for key in ("name", "family"))
    return tuple(kind for field in named if field is not None for kind in get_args(field.annotation))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
