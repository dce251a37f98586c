"""What installed packages offer, each through an entry point: hooks, objectives, sources, rules, families and steps of
deduplication."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from data_pipeline.foundation.errors import UserError

T = TypeVar("T")
_KINDS = {
    "hook": "hooks",
    "objective": "objectives",
    "source": "sources",
    "rule": "rules",
    "family": "families",
    "dedup step": "dedup_steps",
}


def offered(kind: str, base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` under the entry points `encdec_pretrain.KINDS` of all installed packages, by name.

    Raises UserError for one that can't be imported or is no such class.
    """
    found = {}
    for entry in entry_points(group=f"encdec_pretrain.{_KINDS[kind]}"):
        try:
            loaded = entry.load()
        except Exception as error:
            raise UserError(f"the {kind} {entry.name} of {entry.value} can't be imported: {error}") from None
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise UserError(f"the {kind} {entry.name}: {entry.value} is no subclass of {base.__name__}")
        found[entry.name] = loaded
    return found


def named(given: Mapping[str, Any], key: str, kind: str, base: type[T]) -> type[T]:
    """The subclass of `base` that settings name under `key`. Raises ValueError if no installed package has it."""
    found = offered(kind, base)
    if (name := given.get(key)) not in found:
        raise ValueError(f"no installed package offers the {key} {name!r}; there is {', '.join(found) or 'none'}")
    return found[name]
