"""The page docs/reference/python.md: what Python code may rely on, from signatures and docstrings.

    python -m docs.site.python_reference > docs/reference/python.md

Nothing is imported: griffe reads the source, so the page is the same with every version of Python.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PACKAGES = ("data_pipeline", "pretrain", "launch")
LINE = 100  # characters; a longer signature has a line for each parameter
INTRODUCTION = """\
# Python

What `__all__` of `data_pipeline`, `pretrain` and `launch` offers to Python code. [Use from
Python](../how-to/use-from-python.md) has examples. `python -m docs.site.python_reference` prints this page from the
code's signatures and docstrings."""


def public() -> dict[str, list[griffe.Object]]:
    """The objects in `__all__` of each package, by name."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    packages = {name: loader.load(name) for name in PACKAGES}
    loader.resolve_aliases(implicit=False, external=False)
    return {
        name: [_target(package[one]) for one in sorted(map(str, package.exports or ()), key=str.lower)]
        for name, package in packages.items()
    }


def page() -> str:
    """The whole page, in Markdown."""
    packages = public()
    every = [one for package in packages.values() for one in package]
    known = {one.path for one in every}
    types = {one.path: one for named in every for one in _types_of(named) if one.path not in known}
    parts = [INTRODUCTION]
    for package, objects in packages.items():
        parts.append(f"## {package}")
        parts += [part for one in objects for part in _parts(f"{package}.{one.name}", one)]
    uses = "Import them for annotations, and Callback to write one."
    parts.append(f"## Other types\n\nWhat these functions take or return. {uses}")
    parts += [part for one in sorted(types.values(), key=lambda one: one.name) for part in _parts(one.name, one)]
    return "\n\n".join(parts) + "\n"


def members(of: griffe.Object) -> list[griffe.Object]:
    """The documented public members that a class has itself; none for a function."""
    found = of.members.values() if isinstance(of, griffe.Class) else ()
    return [_target(one) for one in found if not one.name.startswith("_") and one.docstring]


def _target(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _named(of: griffe.Object) -> Iterator[tuple[str, griffe.Object]]:
    """The objects of these packages in the signature of `of`, each with its name there."""
    parameters = of.parameters if isinstance(of, griffe.Function) else ()
    for one in (of.annotation, *(part for each in parameters for part in (each.annotation, each.default))):
        for name in one.iterate() if isinstance(one, griffe.Expr) else ():
            if isinstance(name, griffe.ExprName) and name.canonical_path.split(".")[0] in PACKAGES:
                yield str(name), _target(of.modules_collection[name.canonical_path])


def _types_of(of: griffe.Object) -> Iterator[griffe.Class]:
    for one in (of, *members(of)):
        if not isinstance(one, griffe.Class):
            yield from (found for _, found in _named(one) if isinstance(found, griffe.Class))


def _parts(name: str, of: griffe.Object) -> Iterator[str]:
    """The heading, the signature and the text of an object, then those of a class's methods."""
    source = of.relative_filepath.as_posix()
    yield f"### {name}\n\n{_code(name, of)}\n\n{_text(of)}\n\nSource: [{source}](../../{source})"
    for one in members(of):
        if isinstance(one, griffe.Function):
            yield f"#### {of.name}.{one.name}\n\n{_code(f'{of.name}.{one.name}', one)}\n\n{_text(one)}"


def _code(name: str, of: griffe.Object) -> str:
    if isinstance(of, griffe.Class):
        bases = ", ".join(base for base in map(str, of.bases) if base.rpartition(".")[2] != of.name)
        return f"```python\nclass {of.name}{f'({bases})' if bases else ''}\n```"
    code = of.signature(name=name)
    for written, found in _named(of):  # a constant or a name for a type: its value
        value = found.value if isinstance(found, griffe.Attribute) else found.name
        code = re.sub(rf"(\w+\.)*\b{written}\b", str(value), code)
    if len(code) > LINE:
        head, _, rest = code.partition("(")
        parameters, _, returned = rest.rpartition(") -> ")
        lines = re.sub(r", (?=\*|/|\w+: )", ",\n    ", parameters)  # not between the arguments of a type
        code = f"{head}(\n    {lines},\n) -> {returned}"
    return f"```python\n{code}\n```"


def _text(of: griffe.Object) -> str:
    """A docstring, with attributes and properties as a list, and pages as links."""
    docstring = of.docstring.value if of.docstring else ""
    before, _, attributes = docstring.partition("\nAttributes:\n")
    entries = re.split(r"\n(?=\S)", textwrap.dedent(attributes)) if attributes else []
    items = [_item(of, *" ".join(entry.split()).split(": ", 1)) for entry in entries]
    items += [_item(of, one.name, one.docstring.value) for one in members(of) if isinstance(one, griffe.Attribute)]
    text = "\n\n".join([before.strip(), *(["\n".join(items)] if items else [])])
    linked = re.sub(r"\bdocs/([\w/-]+\.md)", r"[docs/\1](../\1)", text)
    return linked.replace("](../reference/", "](")


def _item(of: griffe.Object, names: str, meaning: str) -> str:
    """`inputs, targets` -> "- `inputs`, `targets` (`list[int]`): …"."""
    listed = names.split(", ")
    found = [of.all_members[name] for name in listed if name in of.all_members]
    type_ = next((f" (`{one.annotation}`)" for one in found if one.annotation), "")
    return f"- {', '.join(f'`{name}`' for name in listed)}{type_}: {meaning}"


if __name__ == "__main__":
    print(page(), end="")
