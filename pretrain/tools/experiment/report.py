"""An experiment's table, its rows in their groups beside published values, and its picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill, wrap

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.foundation import formatting
from pretrain.tools.experiment.experiment_folder import Experiment, Group, Published
from pretrain.tools.experiment.results import Comparison, Result, Spread, compare, ends_by_seed, holm

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
    """A row of the experiment in one of its groups. `comparison` is None for the baseline.

    `compared`: what rows of the group are compared by, `metric` or the validation loss. `adjusted_p`: its p-value,
    adjusted for all comparisons of the table.
    """

    group: str
    metric: str | None
    row: str
    is_baseline: bool
    seeds: list[int]
    parameters: int | None
    compared: Spread | None
    comparison: Comparison | None
    published: Published | None
    train_loss: Spread | None
    validation_loss: Spread | None
    embedding_loss: Spread | None
    effective_rank: Spread | None
    adjusted_p: float | None = None


def lines(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """Every row of every group, in order; without values if none of its runs has finished."""
    found = []
    for group in experiment.groups:
        ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
        compared = compare(ends, group.baseline)
        for row in group.rows:
            runs = [result for result in results if result.row == row]
            line = Line(
                group.title,
                group.metric,
                row,
                row == group.baseline,
                [run.seed for run in runs],
                runs[0].parameters if runs else None,
                Spread.of([*ends[row].values()]),
                compared.get(row),
                experiment.published.get(row),
                _spread(runs, "train_loss"),
                _spread(runs, "validation_loss"),
                _spread(runs, "embedding_loss"),
                _spread(runs, "effective_rank"),
            )
            found.append(line)
    tested = [(line, line.comparison.p) for line in found if line.comparison and line.comparison.p is not None]
    for (line, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        line.adjusted_p = p
    return found


def _spread(results: Sequence[Result], name: str) -> Spread | None:
    return Spread.of([value for result in results if (value := getattr(result, name)) is not None])


def _cells(line: Line, most_seeds: int) -> list[str]:
    number = len(line.seeds)
    return [
        line.row + "*" * line.is_baseline + f"({number})" * (number < most_seeds),
        _count(line.parameters),
        str(line.train_loss or ""),
        str(line.compared or ""),
        _small(line.embedding_loss.mean if line.embedding_loss else None),
        _shown(line.effective_rank.mean if line.effective_rank else None, ".1f"),
        _shown(line.comparison.difference if line.comparison else None, "+.3f"),
        "<.001" if line.adjusted_p is not None and line.adjusted_p < 0.001 else _shown(line.adjusted_p, ".3f"),
    ]


def _published_cells(published: Published) -> list[str]:
    losses = (_shown(value, ".3f") for value in (published.train_loss, published.validation_loss))
    return [" published", _count(published.parameters), *losses, _small(published.embedding_loss), "", "", ""]


def _blocks(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """The title of each group, with what its spread lets one tell, and the cells of its lines."""
    most_seeds = max((len(line.seeds) for line in lines), default=0)
    comparisons = sum(line.comparison is not None for line in lines)
    for title in dict.fromkeys(line.group for line in lines):
        group = [line for line in lines if line.group == title]
        compared, metric = [line.comparison for line in group if line.comparison], group[0].metric
        told = [least for one in compared if (least := one.resolution(comparisons)) is not None]
        cells = []
        for line in group:
            cells.append(_cells(line, most_seeds))
            if line.published:
                cells.append(_published_cells(line.published))
        instead = f", {metric} in place of the validation loss" if metric else ""
        unit = "" if metric else " nats"
        resolution = f" (differences from {max(told):.3f}{unit} on can be told)" if told else ""
        yield title + instead + resolution, cells


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal of 80 columns."""
    blocks = list(_blocks(lines))
    head, *printed = formatting.aligned([_HEADINGS, *(cells for _, block in blocks for cells in block)])
    text = [head]
    for title, block in blocks:
        text += ["", *wrap(title, _COLUMNS), *printed[: len(block)]]
        del printed[: len(block)]
    return "\n".join([*text, "", *wrap(_NOTE, _COLUMNS)])


def markdown(lines: Sequence[Line]) -> str:
    """The same as a Markdown table."""
    rows: list[list[str]] = []
    for title, block in _blocks(lines):
        rows.append([f"**{title}**", *[""] * (len(_HEADINGS) - 1)])
        rows += [[cell.strip() for cell in cells] for cells in block]
    return "\n".join([*formatting.markdown(_HEADINGS, rows), "", _NOTE, ""])


def _count(number: int | None) -> str:
    """306496 -> "306,496"; 15763500 -> "15.7635M"."""
    if number is None:
        return ""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.4f}M"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _small(value: float | None) -> str:
    """4.673e-09 -> "4.7e-9"."""
    return _shown(value, ".1e").replace("e-0", "e-").replace("e+0", "e")


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


def _draw_curves(axes: Axes, experiment: Experiment, results: Sequence[Result]) -> None:
    """Means over seeds, at the steps that all of them have."""
    for number, row in enumerate(experiment.rows):
        curves = [dict(result.curve) for result in results if result.row == row]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        means = [fmean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, means, ".-", label=row, color=colormaps["tab20"](number % 20), linewidth=1.2, markersize=3)
    axes.legend(fontsize=5, ncols=4)
    axes.set(title=f"{experiment.name}: validation loss", xlabel="step", ylabel="nats per token")


def _draw_ends(axes: Axes, group: Group, results: Sequence[Result]) -> None:
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
