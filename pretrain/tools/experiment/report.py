"""An experiment's table, its rows in their groups beside published values, and its picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from statistics import fmean
from textwrap import fill, wrap

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.base.formatting import aligned
from pretrain.tools.experiment.experiment_folder import Experiment, Group, Published
from pretrain.tools.experiment.results import Comparison, Result, Spread, compare, ends_by_seed, holm, shown

_NOTE = (
    "±: standard deviation over seeds; (n): of n seeds only. Δ: validation loss, or what is in its place, minus the "
    "baseline's (*), paired by seed. p: t-test, two-sided, with the scatter of all rows of the group, adjusted for all "
    "comparisons (Holm)."
)
_HEADINGS = ("row", "params", "train", "validation", "emb.", "rank", "Δ", "p")
_COLUMNS = 80  # of a terminal
_CURVES = 20  # rows of dots that the panel of curves is as high as
_LINE, _MARGIN = 0.24, 0.9  # inches


@dataclass
class Line:
    """A row of the experiment in one of its groups, with its finished runs. `comparison` is None for the baseline.
    `adjusted_p`: its p-value, adjusted for all comparisons of the table."""

    group: Group
    row: str
    runs: list[Result]
    published: Published | None
    comparison: Comparison | None
    adjusted_p: float | None = None

    @property
    def is_baseline(self) -> bool:
        return self.row == self.group.baseline

    @property
    def compared(self) -> Spread | None:
        """What rows of the group are compared by: their `metric` or the validation loss."""
        return Spread.of([*ends_by_seed(self.runs, self.row, self.group.metric).values()])

    def spread(self, name: str) -> Spread | None:
        """That of an attribute of the runs."""
        return Spread.of([value for run in self.runs if (value := getattr(run, name)) is not None])


def lines(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """Every row of every group, in order; without values if none of its runs has finished."""
    found = []
    for group in experiment.groups:
        ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
        compared = compare(ends, group.baseline)
        for row in group.rows:
            runs = [result for result in results if result.row == row]
            found.append(Line(group, row, runs, experiment.published.get(row), compared.get(row)))
    tested = [(line, line.comparison.p) for line in found if line.comparison and line.comparison.p is not None]
    for (line, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        line.adjusted_p = p
    return found


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal of 80 columns."""
    blocks = list(_blocks(lines))
    head, *printed = aligned([_HEADINGS, *(cells for _, block in blocks for cells in block)])
    text, rest = [head], iter(printed)
    for title, block in blocks:
        text += ["", *wrap(title, _COLUMNS), *islice(rest, len(block))]
    return "\n".join([*text, "", *wrap(_NOTE, _COLUMNS)])


def _blocks(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """The title of each group and the cells of its lines."""
    most_seeds = max((len(line.runs) for line in lines), default=0)
    for title, found in groupby(lines, key=lambda line: line.group.title):
        group, cells = list(found), list[list[str]]()
        metric = group[0].group.metric
        for line in group:
            cells.append(_cells(line, most_seeds))
            if one := line.published:
                losses = [shown(value, ".3f") for value in (one.train_loss, one.validation_loss)]
                cells.append([" published", _count(one.parameters), *losses, _small(one.embedding_loss), "", "", ""])
        yield title + (f", {metric} in place of the validation loss" if metric else ""), cells


def _cells(line: Line, most_seeds: int) -> list[str]:
    number, p = len(line.runs), line.adjusted_p
    embedding_loss, rank = (line.spread(name) for name in ("embedding_loss", "effective_rank"))
    return [
        line.row + "*" * line.is_baseline + f"({number})" * (number < most_seeds),
        _count(line.runs[0].parameters if line.runs else None),
        shown(line.spread("train_loss"), ".3f"),
        shown(line.compared, ".3f"),
        _small(embedding_loss.mean if embedding_loss else None),
        shown(rank.mean if rank else None, ".1f"),
        shown(line.comparison.difference if line.comparison else None, "+.3f"),
        "<.001" if p is not None and p < 0.001 else shown(p, ".3f"),
    ]


def _count(number: int | None) -> str:
    """306496 -> "306,496"; 15763500 -> "15.7635M"."""
    if number is None:
        return ""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.4f}M"


def _small(value: float | None) -> str:
    """4.673e-09 -> "4.7e-9"."""
    return shown(value, ".1e").replace("e-0", "e-").replace("e+0", "e")


def picture(experiment: Experiment, results: Sequence[Result]) -> Figure:
    """A panel of the validation losses of all rows, then one for each group of which two rows can be compared."""
    differences = [(group, _differences(group, results)) for group in experiment.groups]
    drawn = [(group, rows) for group, rows in differences if len(rows) > 1]
    heights = [_CURVES, *(len(rows) + 2 for _, rows in drawn)]
    figure = Figure(figsize=(8.0, _LINE * sum(heights) + _MARGIN * len(heights)), layout="constrained")
    curves, *ends = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_curves(curves, experiment, results)
    for (group, rows), axes in zip(drawn, ends, strict=True):
        _draw_ends(axes, group, rows)
    return figure


def _draw_curves(axes: Axes, experiment: Experiment, results: Sequence[Result]) -> None:
    """Means over seeds, at the steps that all of them have."""
    for number, row in enumerate(experiment.rows):
        curves = [dict(result.curve) for result in results if result.row == row]
        if not curves:
            continue
        steps = sorted(set.intersection(*map(set, curves)))
        means = [fmean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, ".-", label=row, color=colormaps["tab20"](number % 20), linewidth=1.2, markersize=3)
    axes.legend(fontsize=5, ncols=4)
    axes.set(title=f"{experiment.name}: validation loss", xlabel="step", ylabel="nats per token")


def _differences(group: Group, results: Sequence[Result]) -> dict[str, list[float]]:
    """The last values of rows, minus their baseline's end with the same seed; no row without a seed in common."""
    ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
    base = ends[group.baseline]
    found = {row: [end[seed] - base[seed] for seed in end.keys() & base.keys()] for row, end in ends.items()}
    return {row: values for row, values in found.items() if values}


def _draw_ends(axes: Axes, group: Group, differences: dict[str, list[float]]) -> None:
    """A dot for each seed and a bar for their mean, the lowest row on top."""
    drawn = sorted(differences, key=lambda row: -fmean(differences[row]))
    for height, row in enumerate(drawn):
        axes.plot(differences[row], [height] * len(differences[row]), ".", color="tab:blue", alpha=0.7)
        axes.plot(fmean(differences[row]), height, "|", color="black", markersize=10, markeredgewidth=2)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(drawn)), drawn, fontsize=8)
    axes.grid(axis="y", linewidth=0.3)
    unit = group.metric or "nats per token"
    axes.set(title=fill(group.title, 92), xlabel=f"{unit} above {group.baseline}, each seed and the mean")
