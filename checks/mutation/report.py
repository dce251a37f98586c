"""docs/results/mutation: mutants.csv, which the runs write, and the tables that follow from it."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from checks.mutation.mutants import ROOT, Mutant
from checks.mutation.runner import Verdict

FOLDER = ROOT / "docs/results/mutation"
MUTANTS = FOLDER / "mutants.csv"


@dataclass(frozen=True)
class Row:
    """A line of mutants.csv.

    Attributes:
        before, after: seen or survived, in the first run, and in the last one of what survived.
        tests: number of tests that were chosen for it in the last run.
        seen_by: the test that failed, or `waits` or `computes`: without end.
        seconds: the wall-clock time of the last run.
        note: why a survivor can't change a result.
    """

    subject: str
    module: str
    function: str
    line: str
    mutation: str
    before: str
    after: str = ""
    tests: str = ""
    seen_by: str = ""
    seconds: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.function, self.line, self.mutation

    @property
    def state(self) -> str:
        return self.after or self.before

    def tried(self, verdict: Verdict, is_first: bool) -> "Row":
        state = {"before" if is_first else "after": verdict.state}
        facts = {"tests": str(verdict.tests), "seen_by": verdict.seen_by, "seconds": f"{verdict.seconds:.1f}"}
        return replace(self, **state, **facts)


def read(path: Path = MUTANTS) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        return [Row(**row) for row in csv.DictReader(lines)]


def write(rows: Sequence[Row], path: Path = MUTANTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    partial.rename(path)


def add(mutant: Mutant, verdict: Verdict, path: Path = MUTANTS) -> None:
    """Writes what became of a mutant, the first time or a later one."""
    rows = {row.key: row for row in read(path)}
    known = rows.get(mutant.key)
    row = known or Row(mutant.subject, mutant.module, mutant.function, str(mutant.lines[0]), mutant.mutation, "")
    write([*(rows | {mutant.key: row.tried(verdict, known is None)}).values()], path)


def scores(rows: Sequence[Row]) -> list[list[str]]:
    """For each module and for all: mutants, those without an effect, seen before and after, and the two scores."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.subject, row.module), []).append(row)
    return [[subject, f"`{module}`", *_counts(groups[subject, module])] for subject, module in sorted(groups)] + [
        ["all", "", *_counts(rows)]
    ]


def _counts(rows: Sequence[Row]) -> list[str]:
    without_effect = sum(row.state == "survived" and bool(row.note) for row in rows)
    others = len(rows) - without_effect
    seen = [sum(row.before == "seen" for row in rows), sum(row.state == "seen" for row in rows)]
    return [
        str(len(rows)),
        str(without_effect),
        *map(str, seen),
        *(f"{100 * one / max(others, 1):.0f} %" for one in seen),
    ]


def survivors(rows: Sequence[Row]) -> list[list[str]]:
    """The place, the change and the reason of each mutant that survived, or what sees it now."""
    found = sorted(
        (row for row in rows if row.before == "survived"), key=lambda row: (row.subject, row.module, int(row.line))
    )
    ends = [f"now seen by `{row.seen_by.split('::')[-1]}`" if row.state == "seen" else row.note for row in found]
    return [
        [f"`{row.module}`, {row.line}", f"`{row.mutation.replace('|', '¦')}`", end or "not seen"]
        for row, end in zip(found, ends, strict=True)
    ]


def report() -> None:
    """Writes the data of the page's tables; `python -m checks.results --write` puts them into the page."""
    rows = read()
    for name, headings, cells in (
        (
            "scores",
            ["subject", "module", "mutants", "no effect", "seen before", "seen now", "before", "now"],
            scores(rows),
        ),
        ("survivors", ["place", "change", "what became of it"], survivors(rows)),
    ):
        with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows([headings, *cells])
