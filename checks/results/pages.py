"""The tables of docs/results: what stands above each says where its figures are from.

<!-- results: NAME -->             computed from data (checks/results/tables.py)
<!-- results: FILE.csv -->         the rows that a command has printed, in a file beside the page
<!-- results: FILE.json -->        the same, of a benchmark: what its --json wrote
<!-- results: typed FILE.csv -->   rows that a person has typed, from logs or other pages, in a file beside the page
<!-- results: no measurement -->   words
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from data_pipeline.base.atomic import write_bytes

Rows = Sequence[Sequence[str | None]]
"""The cells of a table below its headings, as its page prints them; None: words, which the page alone has."""

_MARK = re.compile(r"<!-- results: (.+) -->")
_WORDS = "no measurement"
_TYPED = "typed "


@dataclass(frozen=True)
class Table:
    """A table of a page. `line`: of its headings, from 0. `mark`: what stands above it."""

    line: int
    mark: str | None
    rows: list[list[str]]

    @property
    def name(self) -> str | None:
        """Whose rows are computed or in a file; None: they are words."""
        return None if self.mark is None or self.mark == _WORDS else self.mark.removeprefix(_TYPED)

    @property
    def is_typed(self) -> bool:
        return (self.mark or "").startswith(_TYPED)


def tables(text: str) -> list[Table]:
    """Those of a page, in order, but for what stands in blocks of code."""
    lines, found, is_code = text.splitlines(), [], False
    for number, line in enumerate(lines):
        is_code ^= line.startswith("```")
        if is_code or not re.match(r"\|[ :|-]+\|$", line):
            continue
        mark = _MARK.fullmatch(lines[number - 2]) if number > 1 else None
        rows = []
        for row in lines[number + 1 :]:
            if not row.startswith("|"):
                break
            rows.append([cell.strip() for cell in row.strip().strip("|").split("|")])
        found.append(Table(number - 1, mark[1] if mark else None, rows))
    return found


def differences(table: Table, computed: Rows) -> list[str]:
    """A line for each cell that differs: the row, the column's number, and both values."""
    found = []
    for number, (own, other) in enumerate(zip_longest(table.rows, computed), start=1):
        name = (own or other or [""])[0] or f"row {number}"
        if own is None or other is None:
            found.append(f"{name}: {'not on the page' if own is None else 'not in the data'}")
        elif len(own) != len(other):
            found.append(f"{name}: {len(own)} columns on the page, {len(other)} from the data")
        else:
            found += [
                f"{name}, column {column}: {cell or 'nothing'} on the page, {value or 'nothing'} from the data"
                for column, (cell, value) in enumerate(zip(own, other, strict=True), start=1)
                if value is not None and cell != value
            ]
    return found


def check(folder: Path, computed: Mapping[str, Rows], whole: Sequence[str] = ()) -> list[str]:
    """A line for each difference between the pages in `folder` and `computed`, and each table that no line says the
    source of. `whole`: pages that a command writes."""
    found, met = [], set()
    for page in sorted(folder.glob("*.md")):
        if page.name in whole:
            continue
        for table in tables(page.read_text(encoding="utf-8")):
            place = f"{page.name}:{table.line + 1}"
            if table.mark is None:
                found.append(f"{place}: a table without <!-- results: … --> above it")
            elif table.name and table.name not in computed:
                found.append(f"{place}: nothing computes {table.name!r}")
            elif table.name:
                met.add(table.name)
                found += [f"{place}: {table.name}: {line}" for line in differences(table, computed[table.name])]
    return found + [f"{name!r}: in no page" for name in computed if name not in met]


def write(folder: Path, computed: Mapping[str, Rows]) -> None:
    """Puts the computed cells into the pages. Words stay in rows that have the same first cell."""
    for page in sorted(folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        lines = text.splitlines()
        for table in reversed(tables(text)):
            if table.name not in computed:
                continue
            before = {row[0]: row for row in table.rows}
            rows = []
            for number, row in enumerate(computed[table.name]):
                same = table.rows[number] if number < len(table.rows) else [""] * len(row)
                words = before.get(row[0], same) if row[0] else same
                rows.append([word if cell is None else cell for cell, word in zip(row, words, strict=True)])
            start = table.line + 2
            end = start + len(table.rows)
            as_it_was = {tuple(row): line for row, line in zip(table.rows, lines[start:end], strict=True)}
            lines[start:end] = [as_it_was.get(tuple(row)) or line_of(row) for row in rows]
        if (changed := "\n".join(lines) + "\n") != text:
            write_bytes(page, changed.encode())


def line_of(cells: Sequence[str]) -> str:
    """A row of a table."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
