"""A picture of an experiment: the curves of its rows over training, or for many rows where they end."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from pretrain.tools.experiment.experiment_file import Experiment, Group
from pretrain.tools.experiment.results import Result, ends_by_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2
_TITLE = 46  # characters of a line, as wide as a panel
_MOST_CURVES = 12  # in a panel; of more rows, or rows that were evaluated once, dots show the ends


def picture(experiment: Experiment, results: Sequence[Result]) -> "Figure":
    """Validation losses of all rows, then a panel for each group: what its rows are compared by, minus that of their
    baseline, paired by seed.

    A line is the mean over seeds; the band of a difference reaches one standard deviation to each side. Instead of many
    lines, and of those with one point, there are the last differences: a dot for each seed and a bar for their mean.
    """
    from matplotlib import colormaps  # slow to import
    from matplotlib.figure import Figure

    curves = {row: _curves(results, row, None) for row in experiment.rows}
    groups = [group for group in experiment.groups if len(group.rows) > 1]
    if any(len(group.rows) > _MOST_CURVES for group in groups) or not _has_curves(curves):
        return _ends(groups, results)
    high = -(-(1 + len(groups)) // _COLUMNS)
    figure = Figure(figsize=(5.4 * _COLUMNS, 3.4 * high), layout="constrained")
    first, *panels = figure.subplots(high, _COLUMNS, squeeze=False).flatten()
    first.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
    for row, by_seed in curves.items():
        _draw(first, row, by_seed, band=False)
    first.set(title=f"{experiment.name}: validation loss", xlabel="step", ylabel="nats per token")
    if any(curves.values()):
        first.legend(fontsize=5, ncols=2)
    for group, axes in zip(groups, panels, strict=False):
        _draw_group(axes, group, {row: _curves(results, row, group.metric) for row in group.rows})
    for axes in panels[len(groups) :]:
        axes.remove()
    return figure


def _curves(results: Sequence[Result], row: str, metric: str | None) -> dict[int, dict[int, float]]:
    """Values by step, for each seed of a row."""
    return {result.seed: dict(result.curve_of(metric)) for result in results if result.row == row}


def _unit(group: Group) -> str:
    return group.metric or "nats per token"


def _has_curves(curves: Mapping[str, Mapping[int, Mapping[int, float]]]) -> bool:
    evaluated = [len(curve) for by_seed in curves.values() for curve in by_seed.values()]
    return not evaluated or max(evaluated) > 1


def _ends(groups: Sequence[Group], results: Sequence[Result]) -> "Figure":
    """A panel for each group: the last value of each row minus the baseline's, the lowest on top."""
    from matplotlib.figure import Figure  # slow to import

    rows = [len(group.rows) for group in groups] or [1]
    figure = Figure(figsize=(8.0, 0.24 * sum(rows) + 0.9 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[number + 2 for number in rows]).flatten()
    for group, axes in zip(groups, panels, strict=False):
        ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
        baseline = ends[group.baseline]
        differences = {
            row: [end[seed] - baseline[seed] for seed in end.keys() & baseline.keys()] for row, end in ends.items()
        }
        drawn = sorted(
            (row for row in group.rows if differences[row]), key=lambda row: -float(np.mean(differences[row]))
        )
        for height, row in enumerate(drawn):
            axes.plot(differences[row], [height] * len(differences[row]), ".", color="tab:blue", alpha=0.7)
            axes.plot(np.mean(differences[row]), height, "|", color="black", markersize=10, markeredgewidth=2)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(drawn)), drawn, fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
        axes.set(
            title=fill(group.title, 2 * _TITLE), xlabel=f"{_unit(group)} above {group.baseline}, each seed and the mean"
        )
    return figure


def _draw_group(axes: "Axes", group: Group, curves: Mapping[str, Mapping[int, Mapping[int, float]]]) -> None:
    axes.axhline(0.0, color="black", linewidth=0.8)
    baseline = curves[group.baseline]
    for row in group.rows:
        if row == group.baseline:
            continue
        by_seed = curves[row]
        pairs = {
            seed: {step: by_seed[seed][step] - baseline[seed][step] for step in by_seed[seed].keys() & baseline[seed]}
            for seed in by_seed.keys() & baseline.keys()
        }
        _draw(axes, row, pairs)
    axes.set(title=fill(group.title, _TITLE), xlabel="step", ylabel=f"{_unit(group)} above {group.baseline}")
    if axes.lines[1:]:
        axes.legend(fontsize=7)


def _draw(axes: "Axes", row: str, by_seed: Mapping[int, Mapping[int, float]], band: bool = True) -> None:
    """The mean over seeds at the steps that all of them have."""
    if not by_seed:
        return
    steps = sorted(set.intersection(*(set(curve) for curve in by_seed.values())))
    values = np.array([[curve[step] for step in steps] for curve in by_seed.values()])
    mean = values.mean(axis=0)
    (line,) = axes.plot(steps, mean, label=row, linewidth=1.2, marker=".", markersize=3)
    if band and len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        axes.fill_between(steps, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.15, linewidth=0)
