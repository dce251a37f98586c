"""Versions of packages and of this source tree, and what other packages offer: hooks, objectives, sources, …"""

import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import data_pipeline
from data_pipeline.base.errors import UserError

PACKAGE = "encdec-pretrain"
_SOURCE = Path(data_pipeline.__file__).parent.parent


def code_version(source: Path = _SOURCE) -> str:
    """The git commit, with "-dirty" if tracked files differ; outside a git repository, the package's version."""
    # --exclude: git would otherwise print a tag instead of the commit
    described = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", source=source).strip()
    return described or package_version()


def package_version() -> str:
    """The version of this package; "unknown" if it isn't installed."""
    return version_of(PACKAGE) or "unknown"


def version_of(package: str) -> str:
    """The version of an installed package; "" if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def git(*arguments: str, source: Path = _SOURCE) -> str:
    """The output of a git command in the source tree, with U+FFFD for bytes that aren't UTF-8. "" if it is no git
    repository or the command fails."""
    if not (source / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


T = TypeVar("T")
# By key of a config file, or of a file written from one: the entry points that offer the key's values.
_OFFERED_UNDER = {
    "objective": "objectives",
    "of": "objectives",
    "model": "families",
    "evaluation": "hooks",
    "optimizer": "optimizers",
    "tokenizer": "tokenizers",
    "steps": "steps",
}


class Kinds(Mapping[str, type[T]]):
    """The subclasses of `base` by name: those that ship, then those that installed packages offer. A class is imported
    when it is looked up, so a run imports the kinds that it names.

    `kinds` and `key`: as in `offered`. `shipped`: for each name, "module:Class". Raises UserError for two of one name,
    and when a class is looked up, as `offered`.
    """

    def __init__(self, kinds: str, base: type[T], key: str, shipped: Mapping[str, str]):
        self._base, self._key = base, key
        self._classes: dict[str, str | EntryPoint] = {**shipped, **by_name(kinds, shipped)}

    def __getitem__(self, name: str) -> type[T]:
        found = self._classes[name]
        if not isinstance(found, str):
            return _loaded(found, self._base, self._key)
        shipped: type[T] = resolve_name(found)
        return shipped

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


def offered(kinds: str, base: type[T], shipped: Collection[str] = (), key: str | None = None) -> dict[str, type[T]]:
    """The subclasses of `base` under the entry points `encdec_pretrain.KINDS` of all installed packages, by name.

    `shipped`: names that this package has itself. `key`: the field whose default must be the name. Raises UserError for
    an entry point that can't be imported, is no subclass of `base` or has another default, and for two of one name.
    """
    return {name: _loaded(entry, base, key) for name, entry in by_name(kinds, shipped).items()}


def imported(entry: EntryPoint) -> Any:
    """What the entry point names. Raises UserError if it can't be imported."""
    was_begun = entry.module in sys.modules
    try:
        return entry.load()
    except Exception as error:
        # A program imports this module, which has imported the module that calls this function.
        way_out = f"; import pretrain.config before {entry.module}" if was_begun else ""
        raise UserError(f"{_where(entry)} can't be imported: {error}{way_out}") from None


def _loaded(entry: EntryPoint, base: type[T], key: str | None) -> type[T]:
    loaded = imported(entry)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise UserError(f"{_where(entry)} is no subclass of {base.__name__}")
    field: Any = getattr(loaded, "model_fields", {}).get(key)
    if key and (field is None or field.default != entry.name):
        raise UserError(f"{_where(entry)} has {field and field.default!r} as its {key}; expected {entry.name!r}")
    return loaded


def by_name(kinds: str, shipped: Collection[str]) -> dict[str, EntryPoint]:
    """The entry points `encdec_pretrain.KINDS` of all installed packages. Raises UserError for two of one name, or with
    a name in `shipped`."""
    found: dict[str, EntryPoint] = {}
    for entry in _entries(kinds):
        if entry.name in shipped or found.setdefault(entry.name, entry).value != entry.value:
            other = "what ships" if entry.name in shipped else "another package"
            raise UserError(
                f"{_where(entry)} of {_package(entry)} has a name that {other} has already; give it another"
            )
    return found


def _where(entry: EntryPoint) -> str:
    return f"{entry.group}: {entry.name} = {entry.value}"


def _entries(kinds: str) -> Iterable[EntryPoint]:
    """The entry points in the order of packages' names, since file systems list them in any order."""
    return sorted(entry_points(group=f"encdec_pretrain.{kinds}"), key=lambda entry: (_package(entry), entry.name))


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"


def offering(kinds: str, name: str) -> str:
    """The package that offers `name`, with its version: "my_package 1.0"; "" for a name that ships."""
    return next((_package(entry) for entry in _entries(kinds) if entry.name == name), "")


def missing(kinds: str, name: object) -> str:
    return f"no installed package offers {name!r} (entry point encdec_pretrain.{kinds}){example(kinds, name)}"


def example(kinds: str, name: object) -> str:
    """How to install the package in `examples` that offers `name`: ": pip install -e FOLDER". "" if none does, and
    outside a checkout."""
    for file in sorted(_SOURCE.glob("examples/*/pyproject.toml")):
        offers = tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        if str(name) in offers.get(f"encdec_pretrain.{kinds}", {}):
            return f": pip install -e {file.parent}"
    return ""


def installed_then(package: str) -> str:
    """The way out for a file that was written with `package`, a result of `offering`."""
    return f"it was {package}; install that" if package else "install the one that does"


def missing_under(keys: Sequence[object], name: object) -> str:
    """`missing`, if packages may offer the value `name` of these keys of a config file; else ""."""
    names = [str(key) for key in keys if not str(key).isdecimal()]
    kinds = "sources" if names == ["sources", "format"] else _OFFERED_UNDER.get(names[-1])
    return missing(kinds, name) if kinds else ""


def named(given: Mapping[str, Any], key: str, kinds: str, base: type[T]) -> type[T]:
    """The subclass of `base` that settings name under `key`. Raises ValueError if no installed package has it."""
    found = offered(kinds, base)
    if (name := given.get(key)) not in found:
        raise ValueError(f"{key}: {missing(kinds, name)}; there is {', '.join(found) or 'none'}")
    return found[name]
