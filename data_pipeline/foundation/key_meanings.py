"""What a key of a config file means and which values it takes: for messages and docs/reference/settings.md."""

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

_LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "multipleOf": "multiple of",
}


def meaning(section: type[BaseModel], key: str) -> str:
    """The docstring below the field `key` of `section`, in one line; "" without one.

    A field that a class declares again without a docstring keeps the meaning that it has in the parent.
    """
    for parent in section.__mro__:
        if issubclass(parent, BaseModel) and key in parent.model_fields and (found := _docstrings(parent).get(key)):
            return " ".join(found.split())
    return ""


@functools.cache
def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of the class. Pydantic would read all of them whenever the class is imported."""
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
    """The first sentence of a meaning, to stand in parentheses: "Rows per step. null: …" -> "rows per step"."""
    sentence = meaning.split(". ")[0].removesuffix(".").replace("`", "")
    first_word = sentence.split(" ")[0].rstrip(",:")
    return sentence[:1].lower() + sentence[1:] if re.fullmatch("[A-Z][a-z]*", first_word) else sentence


def values(schema: dict[str, Any], quote: Callable[[str], str] = str) -> str:
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
            return [f"list of {len(of_fixed_length)}, each {values(of_fixed_length[0], quote)}"]
        return ["non-empty " * bool(schema.get("minItems")) + f"list of {values(schema['items'], quote)}"]
    if kind == "string":
        return ["non-empty " * bool(schema.get("minLength")) + schema.get("format", "text")]
    limits = [f"{sign} {schema[name]:,.10g}" for name, sign in _LIMITS.items() if name in schema]
    return [" ".join(["keys and values" if kind == "object" else kind, ", ".join(limits)]).strip()]
