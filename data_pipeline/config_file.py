"""A YAML file as a typed config: files it extends, `section.key=value` overrides, every problem reported at once."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml import YAMLError

from data_pipeline.errors import UserError

OmegaConf.register_resolver("samples", lambda: str(Path(__file__).parent / "samples"), replace=True)


class Section(BaseModel):
    """A part of a config file. Unknown keys are errors; values keep their types ("5" is no number)."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


ConfigType = TypeVar("ConfigType", bound=Section)


def load(path: str | Path, overrides: Sequence[str], schema: type[ConfigType]) -> ConfigType:
    """The config in the file at `path` with `overrides` applied, checked against `schema`.

    `overrides`: "section.key=value" each; numbers reach into lists ("sources.0.path=…"). A file may name others to
    start from under `extends` (paths relative to itself); they are merged in order, the file itself last.
    Raises UserError naming the file, each wrong key and the nearest valid one.
    """
    merged = _read(Path(path), ())
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"{override!r}: an override has the form section.key=value")
        try:
            OmegaConf.update(merged, key, OmegaConf.create(f"value: {value}").value, force_add=True)
        except (OmegaConfBaseException, YAMLError, ValueError, IndexError, TypeError) as error:
            raise UserError(f"{override!r}: can't be applied: {_first_line(error)}") from None
    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    return check(plain, schema, str(path))


def check(values: Any, schema: type[ConfigType], path: str) -> ConfigType:
    """`values` as a `schema`, or a UserError that lists every problem, each with its key."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [_describe(dict(problem), schema) for problem in error.errors()]
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems)) from None


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
    merged = OmegaConf.merge(*(_read(path.parent / base, (*seen, path.resolve())) for base in bases), config)
    assert isinstance(merged, DictConfig)
    return merged


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _describe(problem: dict[str, Any], schema: type[BaseModel]) -> str:
    names, _ = _walk(schema, problem["loc"])
    key = ".".join(names)
    if problem["type"] == "extra_forbidden":
        *parents, name = problem["loc"]
        above, candidates = _walk(schema, parents)
        keys = [key for candidate in candidates for key in candidate.model_fields]
        nearest = difflib.get_close_matches(str(name), keys, n=1, cutoff=0.5)
        hint = f"; nearest valid key: {'.'.join([*above, nearest[0]])}" if nearest else ""
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower() + message[1:]}, got {problem['input']!r}"


def _walk(schema: type[BaseModel], location: Sequence[Any]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of a file that lead to `location`, and the models that stand there: one, or the options of a union.

    The tag by which pydantic chose an option is part of `location`, but not of the file.
    """
    candidates: list[type[BaseModel]] = [schema]
    names = []
    for part in location:
        tagged = [model for model in candidates if _tagged(model, part)]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            continue
        names.append(str(part))
        following: list[type[BaseModel]] = []
        for candidate in candidates:
            if part in candidate.model_fields:
                following += _models_in(candidate.model_fields[part].annotation)
        candidates = following or candidates  # list positions name no field
    return names, candidates


def _tagged(model: type[BaseModel], tag: Any) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values() if field.default == tag)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
