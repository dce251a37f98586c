"""What a check finds. Each finding is a line of JSON at once, so that a check that is cut off keeps what it had found.

    {"check": "steps", "row": "steps", "value": {"form": "graph", "ms": 151.2}}

A line has one of the keys of `KINDS`, with the name of what was found.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]
KINDS = ("fact", "row", "held", "wrong", "skipped")
_writing = threading.Lock()


class Report:
    """Writes the findings of the check `name` on a device of `kind`, cpu or cuda, to the file `lines`.

    `folder` is for the check's files and is removed afterwards.
    """

    def __init__(self, name: str, lines: Path, folder: Path, kind: str):
        self.kind, self.folder = kind, folder
        self._name, self.lines = name, lines

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def small(self) -> bool:
        """True if the check takes the sizes for a CPU."""
        return not self.cuda

    @property
    def device(self) -> "torch.device":
        import torch  # takes seconds, which a check that hangs or breaks at once doesn't need

        return torch.device(self.kind)

    def fact(self, name: str, value: object) -> None:
        """Records a figure, or a list or dict of them. It can't fail."""
        self._note("fact", name, value)

    def row(self, table: str, /, **values: object) -> None:
        """Adds a row to a table."""
        self._note("row", table, values)

    def expect(self, name: str, holds: bool, found: object = None) -> bool:
        """Records an expectation. An expectation that doesn't hold fails the check, and the check continues."""
        self._note("held" if holds else "wrong", name, found)
        return holds

    def skip(self, name: str, reason: str) -> None:
        """Records what this check left out, and why."""
        self._note("skipped", name, reason)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the check. An exception in the part fails the check, and the check continues after the part."""
        try:
            yield
        except Exception as error:
            message = " ".join(str(error).split())
            self._note("wrong", name, f"{type(error).__name__}: {message[:500]}")

    def _note(self, kind: str, name: str, value: object) -> None:
        line = json.dumps({"check": self._name, kind: name, "value": plain(value)}, ensure_ascii=False)
        with _writing, self.lines.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


Check = Callable[[Report], None]


def findings(lines: Path, name: str, kind: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of each finding of a kind that the check `name` has written, whole or not at its end."""
    for found in lines_of(lines):
        if found.get("check") == name and kind in found and "value" in found:
            yield found[kind], found["value"]


def lines_of(file: Path) -> Iterator[Json]:
    """The lines of a file of findings, but for one that was cut off; none if there is no file."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


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
