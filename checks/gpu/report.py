"""What a check finds. It is written down at once, so that a check that is cut off keeps what it had found."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


class Report:
    """Collects the findings of one check on a device of `kind`, cpu or cuda.

    `small`: whether the check takes the sizes for a CPU. `folder` is for the check's files and is removed afterwards.
    """

    def __init__(self, notes: Path, folder: Path, kind: str, small: bool):
        self.kind, self.small, self.folder = kind, small, folder
        self._notes = notes

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> "torch.device":
        import torch  # takes seconds, which a check that hangs or breaks at once doesn't need

        return torch.device(self.kind)

    def fact(self, name: str, value: object) -> None:
        """Records a figure, or a list or dict of them. It can't fail."""
        self._note("facts", name, value)

    def row(self, table: str, /, **values: object) -> None:
        """Adds a row to a table."""
        self._note("tables", table, values)

    def expect(self, name: str, holds: bool, found: object = None) -> bool:
        """Counts an expectation. One that doesn't hold fails the check, which goes on."""
        self._note("held" if holds else "wrong", name, found)
        return holds

    def skip(self, name: str, reason: str) -> None:
        """Records what this check left out, and why."""
        self._note("skipped", name, reason)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the check: an exception in it fails the check, which goes on after it."""
        try:
            yield
        except Exception as error:
            message = " ".join(str(error).split())
            self._note("wrong", name, f"{type(error).__name__}: {message[:500]}")

    def _note(self, kind: str, name: str, value: object) -> None:
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps([kind, name, plain(value)], ensure_ascii=False) + "\n")


Check = Callable[[Report], None]


@dataclass
class Findings:
    """What a check has noted, for its line of JSON. `held` counts the expectations that held."""

    facts: Json
    tables: dict[str, list[Json]]
    wrong: Json
    skipped: dict[str, str]
    held: int = 0


def read(notes: Path) -> Findings:
    """The findings in a file of notes. A last line that is cut off is left out."""
    found = Findings({}, {}, {}, {})
    for line in notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []:
        try:
            kind, name, value = json.loads(line)
        except ValueError:
            continue
        if kind == "held":
            found.held += 1
        elif kind == "tables":
            found.tables.setdefault(name, []).append(value)
        else:
            getattr(found, kind)[name] = value
    return found


def plain(value: Any) -> Any:
    """`value` as JSON, with four significant digits, and with NaN and infinities as strings."""
    if hasattr(value, "tolist"):  # a tensor
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str | None) else str(value)
