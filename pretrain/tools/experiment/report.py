"""An experiment's table: its rows in their groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from data_pipeline.base.formatting import aligned
from pretrain.tools.experiment.experiment_folder import Experiment, Group
from pretrain.tools.experiment.results import Comparison, Result, Spread, compare, ends_by_seed, holm, shown

_NOTE = (
    "±: standard deviation over seeds; (n): of n seeds only. Δ: validation loss, or what is in its place, minus the "
    "baseline's (*), paired by seed. p: t-test, two-sided, with the scatter of all rows of the group, adjusted for all "
    "comparisons (Holm)."
)
_HEADINGS = ("row", "params", "train", "validation", "Δ", "p")
_COLUMNS = 80  # of a terminal


@dataclass
class Line:
    """A row of the experiment in one of its groups, with its finished runs. `comparison` is None for the baseline.
    `adjusted_p`: its p-value, adjusted for all comparisons of the table."""

    group: Group
    row: str
    runs: list[Result]
    comparison: Comparison | None
    adjusted_p: float | None = None

    @property
    def is_baseline(self) -> bool:
        return self.row == self.group.baseline

    @property
    def compared(self) -> Spread | None:
        """What rows of the group are compared by: their `metric` or the validation loss."""
        return Spread.of([*ends_by_seed(self.runs, self.row, self.group.metric).values()])


def lines(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """Every row of every group, in order; without values if none of its runs has finished."""
    found = []
    for group in experiment.groups:
        ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
        compared = compare(ends, group.baseline)
        runs = {row: [result for result in results if result.row == row] for row in group.rows}
        found += [Line(group, row, runs[row], compared.get(row)) for row in group.rows]
    tested = [(line, line.comparison.p) for line in found if line.comparison and line.comparison.p is not None]
    for (line, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        line.adjusted_p = p
    return found


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal of 80 columns."""
    most_seeds = max((len(line.runs) for line in lines), default=0)
    head, *rows = aligned([_HEADINGS, *(_cells(line, most_seeds) for line in lines)])
    text = [head]
    for title, found in groupby(zip(lines, rows, strict=True), key=lambda pair: _title(pair[0].group)):
        text += ["", *wrap(title, _COLUMNS), *(row for _, row in found)]
    return "\n".join([*text, "", *wrap(_NOTE, _COLUMNS)])


def _title(group: Group) -> str:
    return group.title + (f", {group.metric} in place of the validation loss" if group.metric else "")


def _cells(line: Line, most_seeds: int) -> list[str]:
    number, p = len(line.runs), line.adjusted_p
    return [
        line.row + "*" * line.is_baseline + f"({number})" * (number < most_seeds),
        shown(next((run.parameters for run in line.runs if run.parameters), None), ","),
        shown(Spread.of([run.train_loss for run in line.runs if run.train_loss is not None]), ".3f"),
        shown(line.compared, ".3f"),
        shown(line.comparison.difference if line.comparison else None, "+.3f"),
        "<.001" if p is not None and p < 0.001 else shown(p, ".3f"),
    ]
