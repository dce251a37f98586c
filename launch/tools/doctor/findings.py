"""What a check needs to know, what it has found, and how that is shown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data_pipeline.foundation.formatting import counted
from pretrain.hardware.machine import count_gpus

Level = Literal["ok", "warning", "fault"]
REQUEST = "LAUNCH_DOCTOR_REQUEST"  # in the environment of the doctor's programs: their request, as JSON
_COLUMNS, _INDENT = 80, 9


@dataclass(frozen=True)
class Settings:
    """What the checks of one machine need to know.

    `ranks` are the machine's (None: one for each GPU, or one), `all_ranks` the whole run's. `locked` is a file that the
    head holds locked beside the run directory. `run_file` is the file and its overrides.
    """

    ranks: int | None = None
    all_ranks: int = 1
    workers: int = 2
    directory: str | None = None
    locked: str | None = None
    tracking: str | None = None
    run_file: tuple[str, ...] = ()

    @property
    def ranks_here(self) -> int:
        return self.ranks or count_gpus() or 1


@dataclass(frozen=True)
class Finding:
    """One line of a report. A `fault` would stop a run; a `warning` makes it slower or less safe.

    `expected` and `remedy` (what to do) are empty where all is well. `node` is empty for what isn't one machine's.
    """

    check: str
    level: Level
    found: str
    expected: str = ""
    remedy: str = ""
    node: str = ""


def report(findings: Sequence[Finding]) -> str:
    """The findings in their order, wrapped at 80 columns. Nodes on which a check found the same share a line."""
    nodes = {finding.node for finding in findings if finding.node}
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        words = "" if finding.level == "ok" and len(nodes) > 1 and finding.node else finding.found
        key = Finding(finding.check, finding.level, words, finding.expected, finding.remedy)
        alike.setdefault(key, []).append(finding.node)
    order = list(dict.fromkeys(finding.check for finding in findings))
    lines = []
    for finding, where in sorted(alike.items(), key=lambda item: order.index(item[0].check)):
        names = [name for name in dict.fromkeys(where) if name]
        at = f" on {_names(names)}" if names and len(nodes) > 1 else ""
        text = "; ".join(
            part
            for part in (
                f"{finding.check}{at}" + (f": {finding.found}" if finding.found else ""),
                f"expected {finding.expected}" if finding.expected else "",
                finding.remedy,
            )
            if part
        )
        lines += textwrap.wrap(
            f"{finding.level:<{_INDENT}}{text}",
            _COLUMNS,
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join([*lines, _summary(findings)])


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} nodes ({names[0]} … {names[-1]})"


def _summary(findings: Sequence[Finding]) -> str:
    faults, warnings = (sum(finding.level == level for finding in findings) for level in ("fault", "warning"))
    if faults:
        return f"{counted(faults, 'fault')} would stop a run; {counted(warnings, 'warning')}"
    return f"nothing would stop a run; {counted(warnings, 'warning')}"
