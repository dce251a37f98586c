"""What a check needs to know, what it has found, and how that is shown."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data_pipeline.foundation.formatting import counted

Level = Literal["ok", "warning", "fault"]
_COLUMNS, _INDENT = 80, 9


@dataclass(frozen=True)
class Settings:
    """What a check needs to know: it runs on the node number `node`; `per_node` are the ranks of each.

    `locked` is a file that the head holds locked beside the run directory. `run_file` is the file and its overrides.
    """

    node: int = 0
    per_node: Sequence[int] = (1,)
    workers: int = 2
    directory: str | None = None
    locked: str | None = None
    tracking: str | None = None
    run_file: Sequence[str] = ()

    @property
    def ranks_here(self) -> int:
        return self.per_node[self.node]

    @property
    def all_ranks(self) -> int:
        return sum(self.per_node)


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
    several = len({finding.node for finding in findings if finding.node}) > 1
    alike: dict[Finding, list[str]] = {}
    for one in findings:
        words = "" if one.level == "ok" and several and one.node else one.found
        alike.setdefault(Finding(one.check, one.level, words, one.expected, one.remedy), []).append(one.node)
    order = list(dict.fromkeys(finding.check for finding in findings))
    lines = []
    for one, where in sorted(alike.items(), key=lambda item: order.index(item[0].check)):
        names = [name for name in dict.fromkeys(where) if name and several]
        at = f" on {', '.join(names) if len(names) <= 4 else f'{len(names)} nodes ({names[0]} … {names[-1]})'}"
        found = f"{one.check}{at if names else ''}{': ' if one.found else ''}{one.found}"
        text = "; ".join(filter(None, (found, one.expected and f"expected {one.expected}", one.remedy)))
        lines += textwrap.wrap(
            f"{one.level:<{_INDENT}}{text}",
            _COLUMNS,
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    faults, warnings = (sum(finding.level == level for finding in findings) for level in ("fault", "warning"))
    stops = counted(faults, "fault") if faults else "nothing"
    return "\n".join([*lines, f"{stops} would stop a run; {counted(warnings, 'warning')}"])
