"""A picture of an experiment: validation losses over training, and where the rows of each group end."""

from collections.abc import Sequence
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib import colormaps
from matplotlib.figure import Figure

from pretrain.tools.experiment.experiment_file import Experiment, Group
from pretrain.tools.experiment.results import Result, ends_by_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = 20  # rows of dots that the panel of curves is as high as
_LINE, _MARGIN = 0.24, 0.9  # inches


def picture(experiment: Experiment, results: Sequence[Result]) -> Figure:
    """A panel of the validation losses of all rows, if they were evaluated more than once, then one for each group."""
    groups = [group for group in experiment.groups if len(group.rows) > 1]
    has_curves = not groups or any(len(result.curve) > 1 for result in results)
    heights = [_CURVES] * has_curves + [len(group.rows) + 2 for group in groups]
    figure = Figure(figsize=(8.0, _LINE * sum(heights) + _MARGIN * len(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights).flatten()
    if has_curves:
        _draw_curves(panels[0], experiment, results)
    for group, axes in zip(groups, panels[has_curves:], strict=True):
        _draw_ends(axes, group, results)
    return figure


def _draw_curves(axes: "Axes", experiment: Experiment, results: Sequence[Result]) -> None:
    """Means over seeds, at the steps that all of them have."""
    for number, row in enumerate(experiment.rows):
        curves = [dict(result.curve) for result in results if result.row == row]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        means = [fmean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, ".-", label=row, color=colormaps["tab20"](number % 20), linewidth=1.2, markersize=3)
    axes.legend(fontsize=5, ncols=4)
    axes.set(title=f"{experiment.name}: validation loss", xlabel="step", ylabel="nats per token")


def _draw_ends(axes: "Axes", group: Group, results: Sequence[Result]) -> None:
    """The last values of rows, minus their baseline's end with the same seed: a dot for each seed and a bar for their
    mean, the lowest row on top."""
    ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
    base = ends[group.baseline]
    differences = {row: [end[seed] - base[seed] for seed in end.keys() & base.keys()] for row, end in ends.items()}
    drawn = sorted((row for row in group.rows if differences[row]), key=lambda row: -fmean(differences[row]))
    for height, row in enumerate(drawn):
        axes.plot(differences[row], [height] * len(differences[row]), ".", color="tab:blue", alpha=0.7)
        axes.plot(fmean(differences[row]), height, "|", color="black", markersize=10, markeredgewidth=2)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(drawn)), drawn, fontsize=8)
    axes.grid(axis="y", linewidth=0.3)
    unit = group.metric or "nats per token"
    axes.set(title=fill(group.title, 92), xlabel=f"{unit} above {group.baseline}, each seed and the mean")
