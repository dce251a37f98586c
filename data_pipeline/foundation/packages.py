"""The version of this package or its source tree, and what other packages offer it: hooks, objectives, sources …"""

import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, TypeVar

import data_pipeline
from data_pipeline.foundation.errors import UserError

PACKAGE = "encdec-pretrain"
_SOURCE = Path(data_pipeline.__file__).parent.parent


def code_version(source: Path = _SOURCE) -> str:
    """The git commit, with "-dirty" if tracked files differ from it; the package's version outside a git repository."""
    # without --exclude, git would print a tag instead of the commit
    described = git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", source=source).strip()
    return described or package_version()


def package_version() -> str:
    """The version of the installed package, or "unknown" if the package isn't installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


def git(*arguments: str, source: Path = _SOURCE) -> str:
    """The output of a git command in the source tree; "" if that is no git repository or the command fails."""
    if not (source / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(source), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


T = TypeVar("T")


def offered(kinds: str, base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` under the entry points `encdec_pretrain.KINDS` of all installed packages, by name.

    Raises UserError for one that can't be imported or is no such class.
    """
    found = {}
    for entry in entry_points(group=f"encdec_pretrain.{kinds}"):
        try:
            loaded = entry.load()
        except Exception as error:
            raise UserError(f"{entry.group}: {entry.name} = {entry.value} can't be imported: {error}") from None
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise UserError(f"{entry.group}: {entry.name} = {entry.value} is no subclass of {base.__name__}")
        found[entry.name] = loaded
    return found


def named(given: Mapping[str, Any], key: str, kinds: str, base: type[T]) -> type[T]:
    """The subclass of `base` that settings name under `key`. Raises ValueError if no installed package has it."""
    found = offered(kinds, base)
    if (name := given.get(key)) not in found:
        raise ValueError(f"no installed package offers the {key} {name!r}; there is {', '.join(found) or 'none'}")
    return found[name]
